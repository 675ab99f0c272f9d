"""The first processes of pods: what a rank inherits, what follows from an end, how a worker goes.

tests/cluster has real pods.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.processes import ended_on_failure
from trainer.errors import InputError
from trainer.launch.kubernetes.pod.hosts import listed, read_hostfile, wait_for_all
from trainer.launch.kubernetes.pod.launcher import ranks_command, told_variables
from trainer.launch.kubernetes.pod.names import SSH_KEY, known_host, rendezvous
from trainer.launch.kubernetes.pod.rank import environment, read_environment
from trainer.launch.kubernetes.pod.watch import Watch
from trainer.launch.start_again import asked_after
from trainer.run.checkpoints import newest_step
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.run.launcher_word import StartRequest
from trainer.run.layout import EXIT_FILE
from trainer.run.starts import RECORD, StartsSoFar, add_starts, read_starts
from trainer.world.rendezvous import Rendezvous
from trainer.world.restart_policy import after_end

# What a rank inherits


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "id_rsa"
    path.write_text("a key")
    return path


def test_a_rank_has_its_pods_variables_and_what_mpirun_tells_it(key: Path) -> None:
    pod = {
        "PATH": "/opt/clipship/bin",
        "API_KEY": "x",
        "CLIPSHIP_SUPERVISORS": "w0:29400",
        SSH_KEY: str(key),
        "OMPI_COMM_WORLD_RANK": "wrong",
    }
    own = {
        "PATH": "/usr/bin",
        "HOME": "/home/clipship",
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_RANK": "1",
        "SSH_CLIENT": "x",
    }
    found = environment(pod, own)
    assert {name: found[name] for name in ("PATH", "API_KEY", "HOME")} == {
        "PATH": "/opt/clipship/bin",
        "API_KEY": "x",
        "HOME": "/home/clipship",
    }
    assert found["OMPI_COMM_WORLD_RANK"] == found["PMIX_RANK"] == "1"
    assert Rendezvous.from_env(found) == rendezvous(pod)


def test_values_of_several_lines_and_with_equal_signs_survive(tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(b"A=1=2\0B=one\ntwo\0EMPTY=\0\xff=\xfe\0")
    found = read_environment(tmp_path / "environ")
    assert {name: found[name] for name in ("A", "B", "EMPTY")} == {"A": "1=2", "B": "one\ntwo", "EMPTY": ""}


def test_all_pods_of_a_job_know_the_same_token_and_those_of_another_do_not(key: Path, tmp_path: Path) -> None:
    env = {"CLIPSHIP_SUPERVISORS": "w0:29400", SSH_KEY: str(key)}
    token = rendezvous(env).token
    assert len(token) == 64
    assert rendezvous(env).token == token
    other = tmp_path / "other"
    other.write_text("another key")
    assert rendezvous({**env, SSH_KEY: str(other)}).token != token


def test_every_worker_is_known_by_the_jobs_own_key_and_by_no_other(key: Path) -> None:
    env = {SSH_KEY: str(key)}
    with pytest.raises(
        InputError, match="the public half of the key that CLIPSHIP_SSH_KEY names cannot be read"
    ):
        known_host(env)
    Path(f"{key}.pub").write_text("ecdsa-sha2-nistp521 AAAA operator@cluster with blanks\n")
    assert known_host(env) == "* ecdsa-sha2-nistp521 AAAA\n"


def test_a_pod_without_the_operators_key_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the MPI Operator mounts it"):
        rendezvous({"CLIPSHIP_SUPERVISORS": "w0:29400", SSH_KEY: str(tmp_path / "none")})
    with pytest.raises(InputError, match="CLIPSHIP_SUPERVISORS is not set"):
        rendezvous({})


# What follows from an end


@pytest.mark.parametrize(
    ("code", "asked", "failures", "saved", "over", "counted"),
    [
        (0, False, 0, 0, True, 0),
        (0, True, 0, 0, True, 0),
        (2, False, 0, 0, True, 0),
        (75, True, 0, 0, False, 0),
        (75, False, 3, 0, False, 3),
        (143, True, 0, 0, False, 0),
        (1, False, 0, 0, False, 1),
        (1, False, 3, 0, True, 4),
        (124, False, 3, 0, True, 4),
        (124, False, 3, 10, False, 1),
    ],
)
def test_failures_without_progress_are_bounded_and_requests_are_heeded(
    code: int, asked: bool, failures: int, saved: int, over: bool, counted: int
) -> None:
    before = StartsSoFar("uid", failures=failures)
    after = after_end(before, code, asked=asked, saved_step=saved, retries=3, message="m")
    assert (after.over, after.code, after.failures) == (over, code, counted)


def test_a_new_launcher_remembers_and_a_new_submission_does_not(tmp_path: Path) -> None:
    add_starts(tmp_path, StartsSoFar("uid-1", starts=1))
    last = StartsSoFar("uid-1", starts=2, failures=1, code=1, over=True, message="rank 3\n= gone")
    add_starts(tmp_path, last)
    assert read_starts(tmp_path, "uid-1") == replace(last, message="rank 3 = gone")
    assert read_starts(tmp_path, "uid-2") == StartsSoFar("uid-2")


@pytest.mark.parametrize("text", ["", "{", "[]", "job=uid\nstarts=many\n\n"])
def test_a_memory_that_cannot_be_read_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "artefacts").mkdir()
    (tmp_path / RECORD).write_text(text)
    assert read_starts(tmp_path, "uid") == StartsSoFar("uid")


def test_a_record_that_a_killed_launcher_wrote_by_half_hides_no_earlier_one(tmp_path: Path) -> None:
    last = StartsSoFar("uid", starts=2, failures=2, code=1, over=True, message="failed")
    add_starts(tmp_path, last)
    with open(tmp_path / RECORD, "a") as file:
        file.write("job=uid\nstarts=3\nfail")
    assert read_starts(tmp_path, "uid") == last
    following = replace(last, failures=3)
    add_starts(tmp_path, following)
    assert read_starts(tmp_path, "uid") == following


def test_a_checkpoint_counts_once_it_is_whole(tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert newest_step(tmp_path / "checkpoints") == 0
    (tmp_path / "checkpoints" / "step-00000005" / "manifest.json").write_text("{}")
    assert newest_step(tmp_path / "checkpoints") == 5


# The other pods


def test_the_hostfile_of_the_operator_is_read(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a-worker-0.a.team.svc slots=8\na-worker-1.a.team.svc slots=8\n")
    assert read_hostfile(tmp_path / "hostfile") == ["a-worker-0.a.team.svc", "a-worker-1.a.team.svc"]
    (tmp_path / "hostfile").write_text("\n")
    with pytest.raises(InputError, match="names no worker"):
        read_hostfile(tmp_path / "hostfile")


def test_many_missing_workers_are_listed_shortly() -> None:
    assert (
        listed([f"a-worker-{i}.a.svc" for i in range(1000)])
        == "a-worker-0, a-worker-1, a-worker-2, a-worker-3, a-worker-4 and 995 more"
    )


@pytest.fixture
def greeter() -> Iterator[int]:
    """A port on loopback where somebody greets as sshd does."""
    server = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

    threading.Thread(target=greet, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_the_launcher_waits_for_every_sshd_and_no_longer_than_allowed(greeter: int) -> None:
    assert wait_for_all(["127.0.0.1"], greeter, 60.0, lambda: False, print) == []
    assert wait_for_all(["127.0.0.1", "127.0.0.2"], greeter, 0.0, lambda: False, print) == ["127.0.0.2"]
    assert wait_for_all(["127.0.0.2"], greeter, 60.0, lambda: True, print) == ["127.0.0.2"]


def test_the_runs_time_counts_from_the_first_worker_that_answers(greeter: int) -> None:
    times: list[int] = []
    for hosts in (["127.0.0.2"], ["127.0.0.1", "127.0.0.2"], ["127.0.0.1"]):
        wait_for_all(hosts, greeter, 0.0, lambda: False, print, on_first=lambda: times.append(1))
    assert len(times) == 2
    assert told_variables(None, "", 1) == {}
    assert told_variables(12.3456, "", 1) == {"CLIPSHIP_BEGAN": "12.346"}
    told = {"CLIPSHIP_STARTS_AGAIN": "lost", "CLIPSHIP_GENERATION": "2", "CLIPSHIP_BEGAN": "1.000"}
    assert told_variables(1.0, "lost", 2) == told


def test_a_port_that_accepts_and_says_nothing_is_no_sshd() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        assert wait_for_all(["127.0.0.1"], port, 0.0, lambda: False, print) == ["127.0.0.1"]


# How a worker goes


def start_worker(*command: str) -> "AbstractContextManager[subprocess.Popen[str]]":
    words = [sys.executable, "-m", "trainer.launch.kubernetes.pod.worker", *command]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    return ended_on_failure(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env))


def test_a_worker_whose_sshd_ends_fails_so_that_it_is_started_again() -> None:
    with start_worker("sh", "-c", "exit 0") as worker:
        assert worker.wait(60) == 1
        assert worker.stderr is not None
        assert "sh ended with exit code 0" in worker.stderr.read()


def ask_a_worker_to_go() -> None:
    with start_worker("sh", "-c", "echo up >&2; exec sleep 600") as worker:
        assert worker.stderr is not None
        assert worker.stderr.readline() == "up\n"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0


def test_a_worker_asked_to_go_waits_for_its_ranks(tmp_path: Path) -> None:
    """A process that looks like a supervisor saves for a moment after SIGTERM."""
    script = tmp_path / "supervisor.py"
    script.write_text(
        "import signal, sys, time, pathlib\n"
        "place = pathlib.Path(sys.argv[-1])\n"
        "def save(*_):\n    time.sleep(1.0); (place / 'saved').touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save); (place / 'up').touch()\n"
        "time.sleep(600)\n"
    )
    command = f"{sys.executable} {script} -m trainer.rank {tmp_path} & echo >&2; exec sleep 600"
    with start_worker("sh", "-c", command) as worker:
        assert worker.stderr is not None
        assert worker.stderr.readline() == "\n"
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    assert (tmp_path / "saved").exists(), "it left before its ranks had saved"


def test_processes_that_are_not_its_own_are_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "-m", "trainer.rank", str(tmp_path)]
    with ended_on_failure(subprocess.Popen(command)) as stranger:
        ask_a_worker_to_go()
        assert stranger.poll() is None
        stranger.kill()


# What the launcher sees


def test_the_launcher_takes_no_other_starts_end_for_its_ranks(tmp_path: Path) -> None:
    place = Rendezvous("127.0.0.1", 1, "token")
    watch = Watch(tmp_path, place, silence_s=60.0, start_s=60.0)
    for start in ("another", place.start):
        words = {**asdict(ExitRecord(0, "w0", 1, "refused", 0.0)), "start": start}
        asyncio.run(ExitFiles(str(tmp_path), start).write(EXIT_FILE, words))
        assert watch.is_over() == (start == place.start)
    assert watch.end is not None
    assert watch.end.reason == "refused"


def test_the_launcher_ends_an_mpirun_whose_supervisors_ask_to_be_started_again(tmp_path: Path) -> None:
    """mpirun may wait minutes for a node that has lost power."""
    place = Rendezvous("127.0.0.1", 1, "token")
    record = ExitRecord(1, "w1", 1, "killed", 0.0)

    def asks() -> bool:
        return asked_after(tmp_path, place.start, 2) > 0

    for generation in (2, 3):
        request = StartRequest(replace(record, generation=generation))
        asyncio.run(ExitFiles(str(tmp_path), place.start).request_start(request))
        watch = Watch(tmp_path, place, silence_s=60.0, start_s=60.0, starts_again=asks)
        assert watch.is_over() == (generation == 3)


def test_ranks_are_told_their_generation_by_mpirun_and_all_else_by_their_pods(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: "/usr/bin/mpirun")
    names = ("CLIPSHIP_STARTS_AGAIN", "CLIPSHIP_GENERATION")
    command = ranks_command(Path("/etc/clipship/job.toml"), 4, names)
    assert [command[at + 1] for at, word in enumerate(command) if word == "-x"] == list(names)
    assert "-x" not in ranks_command(Path("/etc/clipship/job.toml"), 4)
    pod = {"CLIPSHIP_SUPERVISORS": "w0:4711", "CLIPSHIP_SSH_KEY": str(key), "HOME": "/root"}
    own = {"CLIPSHIP_GENERATION": "3", "CLIPSHIP_STARTS_AGAIN": "always", "HOME": "/"}
    found = environment(pod, own)
    assert (found["CLIPSHIP_GENERATION"], found["CLIPSHIP_STARTS_AGAIN"]) == ("3", "always")
    assert found["HOME"] == "/root"
