"""`start_ranks` with real launchers: each rank finds its world and environment.

No rank outlives a failure, a signal or the call.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.processes import command_line, ended_on_failure, until
from tests.support.ssh_hosts import missing_program, two_hosts
from trainer.config import Job
from trainer.errors import InputError
from trainer.launch import local
from trainer.launch.hosts import parse_hosts

PROBE = (sys.executable, "-P", str(Path(__file__).parents[1] / "support" / "rank_probe.py"))
needs_sshd = pytest.mark.skipif(
    missing_program() is not None, reason=f"{missing_program()} is missing: apt-get install openssh-server"
)
CLIPSHIP = pytest.param("clipship")
MPIRUN = pytest.param("mpirun", marks=pytest.mark.mpi)
every_launcher = pytest.mark.parametrize("launcher", [CLIPSHIP, MPIRUN])
NAMES = {"clipship": "clipship run", "mpirun": "Open MPI"}


def job_for(launcher: str) -> Job:
    return tiny_job(comm={"launcher": launcher}, env={"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring,Tree"})


def records(output: str) -> list[dict[str, Any]]:
    """Returns the JSON records that the probes printed, sorted by rank."""
    lines = [line[line.index("{") :] for line in output.splitlines() if '{"rank"' in line]
    return sorted((json.loads(line) for line in lines), key=lambda record: int(record["rank"]))


def assert_ended(found: Sequence[dict[str, Any]]) -> None:
    """No rank is left: its process is gone, or its number belongs to another one."""
    assert found
    assert not alive(found)


def alive(found: Sequence[dict[str, Any]]) -> list[int]:
    return [record["pid"] for record in found if b"rank_probe" in command_line(record["pid"])]


@every_launcher
def test_each_rank_finds_its_world_and_the_jobs_environment(
    launcher: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert local.start_ranks(PROBE, job_for(launcher), nproc=3, hosts=None) == 0
    found = records(capfd.readouterr().out)
    assert [(record["rank"], record["local_rank"]) for record in found] == [(0, 0), (1, 1), (2, 2)]
    assert all(
        (record["size"], record["local_size"], record["launcher"]) == (3, 3, NAMES[launcher])
        for record in found
    )
    wanted = {
        "CLIPSHIP_WORLD_SIZE": "3",
        "NCCL_DEBUG": "WARN",
        "NCCL_ALGO": "Ring,Tree",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert all(wanted.items() <= record["env"].items() for record in found)
    assert {record["env"]["MASTER_ADDR"] for record in found} == {"127.0.0.1"}
    assert len({record["env"]["MASTER_PORT"] for record in found}) == 1


@every_launcher
def test_words_of_the_rank_command_arrive_as_they_are(
    launcher: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "name='two  words'", '"', "$HOME", "a;b", "*", "--np=9", ""]
    command = [sys.executable, "-c", "import json, sys; print('words', json.dumps(sys.argv[1:]))", *words]
    assert local.start_ranks(command, job_for(launcher), nproc=1, hosts=None) == 0
    assert json.loads(capfd.readouterr().out.partition("words ")[2]) == words


@every_launcher
@pytest.mark.parametrize(
    ("deed", "code", "said"),
    [
        (
            ["fail", "1", "7"],
            7,
            f"rank 1 on {os.uname().nodename} ended the run with exit code 7: told to fail",
        ),
        (["leave", "1", "5"], 5, ""),
        (["die", "0"], 128 + signal.SIGKILL, ""),
    ],
    ids=["reason", "code alone", "killed"],
)
def test_rank_that_ends_takes_all_with_it_and_gives_its_exit_code(
    launcher: str, deed: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert local.start_ranks([*PROBE, *deed], job_for(launcher), nproc=2, hosts=None) == code
    captured = capfd.readouterr()
    assert_ended(records(captured.out))
    assert said in captured.err
    assert said or "Traceback" not in captured.err


@every_launcher
def test_rank_that_ignores_sigterm_does_not_keep_a_failed_run_alive(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.launch.processes.GRACE_S", 2.0)
    assert local.start_ranks([*PROBE, "hold", "1", "3"], job_for(launcher), nproc=2, hosts=None) == 3
    assert_ended(records(capfd.readouterr().out))


SECRETS = ("of-the-job-7d1f", "of-the-shell-7d1f")
START = """
import os, sys
from tests.integration.test_launch import PROBE, SECRETS, job_for
from trainer.launch.hosts import parse_hosts
from trainer.launch.local import start_ranks
job = job_for(sys.argv[1]).model_copy(update={"env": {"OF_THE_JOB": SECRETS[0]}})
os.environ["OF_THE_SHELL"] = SECRETS[1]
hosts = parse_hosts(sys.argv[2]) if len(sys.argv) > 2 else None
where = {"nproc": None if hosts else 2, "hosts": hosts}
sys.exit(start_ranks([*PROBE, "wait", "nobody"], job, **where))
"""


@every_launcher
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_no_rank_outlives_a_signal_to_the_run(launcher: str, number: int, code: int) -> None:
    command = [sys.executable, "-c", START, launcher]
    with ended_on_failure(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as run:
        assert run.stdout is not None
        found = records(run.stdout.readline() + run.stdout.readline())
        run.send_signal(number)
        assert run.wait() == code
    assert len(found) == 2
    if number == signal.SIGKILL:  # such a run cannot wait for its launcher
        until(lambda: not alive(found), limit_s=60)
    assert_ended(found)


@every_launcher
@pytest.mark.parametrize(
    "where", [(), pytest.param(("node-a:1,node-b:1",), marks=needs_sshd)], ids=["here", "ssh"]
)
def test_no_value_of_a_variable_stands_on_a_command_line(
    launcher: str, where: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """Starts two ranks that wait, and reads the command line of every process on this machine.

    It reads them while the ranks start and once more when both are there.
    """
    if where:
        request.getfixturevalue("ssh")
    shown: set[bytes] = set()
    command = [sys.executable, "-c", START, launcher, *where]
    with ended_on_failure(subprocess.Popen(command, stdout=subprocess.PIPE)) as run:
        assert run.stdout is not None
        printed = ""
        while printed.count("\n") < 2:
            shown |= {command_line(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
            if select.select([run.stdout], [], [], 0.02)[0]:
                printed += os.read(run.stdout.fileno(), 2**16).decode()
            assert run.poll() is None
        found = [Path(f"/proc/{record['pid']}/environ").read_bytes() for record in records(printed)]
        run.send_signal(signal.SIGTERM)
    told = [dict(entry.partition(b"=")[::2] for entry in environ.split(b"\0")) for environ in found]
    for variables in told:  # they have reached the ranks
        assert variables[b"OF_THE_JOB"].decode() == SECRETS[0]
    token = told[0][b"CLIPSHIP_TOKEN"]
    assert [
        line for line in shown if token in line or any(secret.encode() in line for secret in SECRETS)
    ] == []


@every_launcher
def test_modules_of_the_working_folder_are_not_taken_for_ours(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("trainer", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert local.start_ranks(PROBE, job_for(launcher), nproc=1, hosts=None) == 0


@pytest.mark.mpi
@pytest.mark.skipif(not Path("/usr/bin/mpirun").exists(), reason="no system mpirun beside the environment's")
def test_system_mpirun_starts_the_same_world(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "find_open_mpi", lambda: "/usr/bin/mpirun")
    assert local.start_ranks(PROBE, job_for("mpirun"), nproc=2, hosts=None) == 0
    assert [
        (record["rank"], record["size"], record["local_size"]) for record in records(capfd.readouterr().out)
    ] == [(0, 2, 2), (1, 2, 2)]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """ssh reaches node-a and node-b."""
    with two_hosts(tmp_path) as programs:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        yield


@needs_sshd
@every_launcher
@pytest.mark.usefixtures("ssh")
def test_hosts_get_their_ranks_in_order_over_ssh(launcher: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        local.start_ranks(PROBE, job_for(launcher), nproc=None, hosts=parse_hosts("node-b:1,node-a:2")) == 0
    )
    found = records(capfd.readouterr().out)
    reached = [record["env"]["SSH_CONNECTION"].split()[2] for record in found]
    assert reached == ["127.0.0.2", "127.0.0.1", "127.0.0.1"]
    places = [(record["rank"], record["size"], record["local_rank"]) for record in found]
    assert places == [(0, 3, 0), (1, 3, 0), (2, 3, 1)]
    wanted = {"CLIPSHIP_WORLD_SIZE": "3", "NCCL_ALGO": "Ring,Tree", "MASTER_ADDR": "127.0.0.2"}
    wanted["OMP_NUM_THREADS"] = "8"
    assert all(wanted.items() <= record["env"].items() for record in found)


@needs_sshd
@every_launcher
@pytest.mark.usefixtures("ssh")
def test_failed_rank_ends_the_ranks_of_every_host(launcher: str, capfd: pytest.CaptureFixture[str]) -> None:
    hosts = parse_hosts("node-a:2,node-b:1")
    assert local.start_ranks([*PROBE, "fail", "2", "7"], job_for(launcher), nproc=None, hosts=hosts) == 7
    assert_ended(records(capfd.readouterr().out))


@needs_sshd
@pytest.mark.usefixtures("ssh")
def test_first_host_out_of_reach_is_named_before_anything_starts() -> None:
    with pytest.raises(InputError, match=r"ssh nowhere\.invalid .*resolve"):
        local.start_ranks(PROBE, job_for("auto"), nproc=None, hosts=parse_hosts("nowhere.invalid:1,node-b:1"))


@needs_sshd
@pytest.mark.mpi
@pytest.mark.usefixtures("ssh")
def test_another_host_out_of_reach_fails_the_run() -> None:
    job = tiny_job(comm={"backend": "horovod"})
    hosts = parse_hosts("node-b:1,127.0.0.9:1")  # no sshd listens there
    assert local.start_ranks(PROBE, job, nproc=None, hosts=hosts) not in (0, 2)
