"""The first processes of pods: what a rank inherits, what the launcher makes of an end, how a worker goes.

tests/cluster has real pods.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.processes import ended_on_failure
from trainer.config.loader import dump_job
from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_START_AGAIN
from trainer.launch.kubernetes.pod import launcher, node, rank, starts
from trainer.launch.kubernetes.pod.hosts import wait_for_all
from trainer.run.exit_record import ExitRecord
from trainer.world.rendezvous import Rendezvous

Capture = pytest.CaptureFixture[str]

# What a rank inherits


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "id_rsa"
    path.write_text("a key")
    Path(f"{path}.pub").write_text("ecdsa-sha2-nistp521 AAAA operator@cluster with blanks\n")
    return path


def pod_of(key: Path, **variables: str) -> dict[str, str]:
    return {"CLIPSHIP_SUPERVISORS": "127.0.0.1:29400", "CLIPSHIP_SSH_KEY": str(key), **variables}


def test_a_rank_has_its_pods_variables_and_what_mpirun_tells_it(key: Path) -> None:
    pod = pod_of(key, PATH="/opt/clipship/bin", API_KEY="x", OMPI_COMM_WORLD_RANK="wrong", HOME="/root")
    told = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
    again = {"CLIPSHIP_GENERATION": "3", "CLIPSHIP_STARTS_AGAIN": "always"}
    found = rank.environment(pod, {"PATH": "/usr/bin", "HOME": "/", "SSH_CLIENT": "x", **told, **again})
    own = {"PATH": "/opt/clipship/bin", "API_KEY": "x", "HOME": "/root", "SSH_CLIENT": "x", **told, **again}
    address = {"CLIPSHIP_SUPERVISORS": "127.0.0.1:29400"}
    assert {name: found[name] for name in (*own, *address)} == {**own, **address}


def test_values_of_several_lines_and_with_equal_signs_survive(tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(b"A=1=2\0B=one\ntwo\0EMPTY=\0\xff=\xfe\0")
    found = rank.read_environment(tmp_path / "environ")
    assert {name: found[name] for name in ("A", "B", "EMPTY")} == {"A": "1=2", "B": "one\ntwo", "EMPTY": ""}


# What the launcher does


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a second of the launcher a fiftieth of one."""
    began, monotonic, sleep = time.monotonic(), time.monotonic, time.sleep
    monkeypatch.setattr("time.monotonic", lambda: began + 50 * (monotonic() - began))
    monkeypatch.setattr("time.sleep", lambda seconds: sleep(seconds / 50))


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


class Pods:
    """A launcher's pod with its job, and a script in place of mpirun that ends as it is told."""

    def __init__(self, folder: Path, key: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.run, self._port = folder, folder / "runs" / "tiny", port
        self.pod = pod_of(key, CLIPSHIP_LAUNCHER_JOB="uid-1", PATH=f"{folder}/bin:/usr/bin:/bin")
        rendezvous = Rendezvous.from_env(rank.environment(self.pod, {}))
        assert rendezvous is not None
        self._start = rendezvous.start
        (folder / "bin").mkdir()
        self.hosts("127.0.0.1")
        monkeypatch.setattr(launcher, "HOSTFILE", folder / "hostfile")
        monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
        self._patch = monkeypatch

    def hosts(self, *names: str) -> None:
        (self.folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names))

    def starts(self, *ends: tuple[int, int], asked: bool = False, retries: int = 3) -> int:
        """Runs a launcher whose starts of the ranks end with these codes and newest checkpoints."""
        for number, (code, _) in enumerate(ends, 1):
            end = asdict(ExitRecord(0, "w0", code, f"end {number}", 0.0)) | {"start": self._start}
            (self.folder / f"{number}.json").write_text(json.dumps(end))
        steps = " ".join(f"[{number}]={step}" for number, (_, step) in enumerate(ends, 1))
        codes = " ".join(f"[{number}]={code}" for number, (code, _) in enumerate(ends, 1))
        mpirun = self.folder / "bin" / "mpirun"
        mpirun.write_text(f"""#!/bin/bash
            cd {self.folder}; echo "$*" >>called; env >environment; number=$(wc -l <called)
            declare -A codes=({codes}) steps=({steps})
            saved={self.run}/checkpoints/step-$(printf %08d ${{steps[$number]}})
            [ ${{steps[$number]}} -gt 0 ] && mkdir -p $saved && echo '{{}}' >$saved/manifest.json
            cp $number.json {self.run}/exit.json
            {"trap : USR2; kill -TERM $PPID; sleep 0.1" if asked else ""}
            exit ${{codes[$number]}}""")
        mpirun.chmod(0o755)
        self.run.mkdir(parents=True, exist_ok=True)
        job = tiny_job(
            image={"tag": "a.b/c:1"},
            logging={"runs": str(self.run.parent)},
            resources={"nodes": 1, "gpus_per_node": 1},
            kubernetes={"kind": "mpijob", "retries": retries, "workers_ready_s": 10.0},
        )
        (self.folder / "job.toml").write_text(dump_job(job))
        for name, value in self.pod.items():
            self._patch.setenv(name, value)
        return launcher.main([str(self.folder / "job.toml"), f"--ssh-port={self._port}"])

    @property
    def called(self) -> list[str]:
        """The command lines of mpirun so far."""
        path = self.folder / "called"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def pods(
    tmp_path: Path, key: Path, greeter: int, monkeypatch: pytest.MonkeyPatch, quick: None
) -> Iterator[Pods]:
    before = {number: signal.getsignal(number) for number in range(1, 32) if number not in (9, 19)}
    yield Pods(tmp_path, key, greeter, monkeypatch)
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)


FAILED, SAVED = (1, 0), (124, 10)


@pytest.mark.parametrize(
    ("ends", "asked", "code", "starts"),
    [
        ([(0, 0)], False, 0, 1),
        ([(2, 0)], False, 2, 1),
        ([(75, 0)], True, 75, 1),
        ([(75, 0), FAILED, (75, 0), FAILED, FAILED, FAILED], False, 1, 6),
        ([FAILED, FAILED, FAILED, SAVED, FAILED, FAILED, (124, 10)], False, 124, 7),
    ],
    ids=["done", "bad input", "saved", "failures", "failures with progress"],
)
def test_failures_without_progress_are_bounded_and_requests_are_heeded(
    pods: Pods, ends: list[tuple[int, int]], asked: bool, code: int, starts: int
) -> None:
    assert pods.starts(*ends, asked=asked) == code
    assert len(pods.called) == starts


def test_a_new_launcher_remembers_and_a_new_submission_does_not(pods: Pods, capsys: Capture) -> None:
    """Nor does it forget by the half of a record that a killed launcher wrote, or by one that is none."""
    assert pods.starts((2, 0)) == 2
    with open(pods.run / "artefacts" / "starts", "a") as file:
        file.write("job=uid-1\nstarts=many\n\njob=uid-1\nstarts=3\nfail")
    capsys.readouterr()
    assert pods.starts((0, 0)) == 2
    assert "end 1; last logged step: none, newest checkpoint: none" in capsys.readouterr().err
    assert len(pods.called) == 1
    pods.pod["CLIPSHIP_LAUNCHER_JOB"] = "uid-2"
    assert pods.starts((0, 0), (0, 0)) == 0
    assert len(pods.called) == 2


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda pods: pods.hosts(), "hostfile names no worker"),
        (lambda pods: (pods.folder / "hostfile").unlink(), "the MPI Operator mounts it into the launcher"),
        (lambda pods: (pods.folder / "id_rsa").unlink(), "the MPI Operator mounts it at"),
        (lambda pods: pods.pod.update(CLIPSHIP_SUPERVISORS=""), "CLIPSHIP_SUPERVISORS is not set"),
        (lambda pods: (pods.folder / "id_rsa.pub").unlink(), "CLIPSHIP_SSH_KEY names cannot be read"),
    ],
    ids=["no workers", "no hostfile", "no key", "no address", "no public key"],
)
def test_a_pod_that_the_operator_has_not_made_says_so(
    pods: Pods, capsys: Capture, spoil: Callable[[Pods], object], said: str
) -> None:
    spoil(pods)
    assert pods.starts((0, 0)) == 2
    assert said in capsys.readouterr().err
    assert pods.called == []


def test_workers_that_do_not_come_are_listed_shortly(pods: Pods, capsys: Capture) -> None:
    pods.hosts("127.0.0.1", *(f"127.0.0.{number}" for number in range(2, 9)))
    assert pods.starts(retries=0) == 1
    said = "7 of 8 workers were not ready within kubernetes.workers_ready_s = 10 s: 127, 127, 127, 127, 127 "
    assert f"{said}and 2 more; " in capsys.readouterr().err


def test_the_launcher_waits_for_every_sshd_and_counts_time_from_the_first_that_answers(
    greeter: int, quick: None
) -> None:
    times: list[int] = []

    def silent(*hosts: str, limit_s: float = 0.0, given_up: bool = False) -> list[str]:
        begun = lambda: times.append(1)  # noqa: E731
        return wait_for_all(hosts, greeter, limit_s, lambda: given_up, print, on_first=begun)

    assert silent("127.0.0.2") == ["127.0.0.2"]
    assert times == []
    assert silent("127.0.0.1", limit_s=60.0) == []
    assert silent("127.0.0.1", "127.0.0.2") == ["127.0.0.2"]
    assert len(times) == 2
    assert silent("127.0.0.2", limit_s=60.0, given_up=True) == ["127.0.0.2"]


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
        with start_worker("sh", "-c", "echo up >&2; exec sleep 600") as worker:
            assert worker.stderr is not None
            assert worker.stderr.readline() == "up\n"
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
        assert stranger.poll() is None
        stranger.kill()


# Starts of an Indexed Job's pods in the run folder.


def test_a_pod_that_comes_again_is_known(tmp_path: Path) -> None:
    start = starts.open_start(tmp_path, "uid")
    assert start.missing(3) == [0, 1, 2]
    assert start.mark(1)
    assert not start.mark(1)
    assert start.missing(3) == [0, 2]
    start.unmark(1)
    assert start.mark(1)


def test_a_run_that_fails_more_often_than_it_may_ends_for_good(tmp_path: Path) -> None:
    for ends, left in ((EXIT_PREEMPTED, EXIT_PREEMPTED), (EXIT_FAILED, EXIT_START_AGAIN), (EXIT_FAILED,) * 2):
        end = starts.open_start(tmp_path, "uid").settle(ends, "why", retries=1)
        assert starts.leave_code(end) == left
    assert starts.open_start(tmp_path, "uid").number == 3, "it was started again"


def test_an_end_that_another_pod_is_making_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is whole or, on a file system without links, empty for a moment."""
    monkeypatch.setattr(starts, "_BEING_WRITTEN_S", 0.0)
    start = starts.open_start(tmp_path, "uid")
    end = start.settle(EXIT_FAILED, "why", retries=1)
    whole = (start.folder / "end").read_text()
    (start.folder / "end").write_text("")
    with pytest.raises(OSError, match="has not filled it"):
        _ = start.end
    (start.folder / "end").write_text(whole)
    assert start.end == end


def test_a_start_whose_token_was_never_written_is_passed_over(tmp_path: Path) -> None:
    """Its pod died between making the file and filling it, on a file system without links."""
    first = starts.open_start(tmp_path, "job")
    assert starts.open_start(tmp_path, "job") == first, "all pods of a job find the same"
    token = first.folder / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    token.write_text("")
    assert starts.open_start(tmp_path, "job") == first, "it may be written just now"
    os.utime(token, (0, 0))
    second = starts.open_start(tmp_path, "job")
    assert (second.number, len(second.token)) == (2, 32)
    assert starts.open_start(tmp_path, "job") == second


# Decisions of the first process of an Indexed Job's pod: how it leaves, and what it does when asked to stop.
# tests/integration/test_job_pods.py has whole runs.

UID = "00000000-0000-0000-0000-00000000c11b"


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def pod(tmp_path: Path) -> node.Node:
    job = tiny_job(logging={"runs": str(tmp_path)}, resources={"nodes": 2, "gpus_per_node": 1})
    (tmp_path / "tiny").mkdir()
    own = {"JOB_COMPLETION_INDEX": "1", "CLIPSHIP_LAUNCHER_JOB": UID, "CLIPSHIP_SUPERVISORS": "tiny-0:29400"}
    return node.Node(tmp_path / "job.toml", job, own)


@pytest.fixture
def start(tmp_path: Path) -> Any:
    begun = starts.open_start(tmp_path / "tiny", UID)
    for index in (0, 1):
        begun.mark(index)
    begun.begin("10.0.0.1")
    return begun


def test_a_run_that_a_second_signal_has_ended_is_over_for_the_next_pods(pod: node.Node, start: Any) -> None:
    record = ExitRecord(3, "tiny-1", 143, "a second signal (15) ended the run at once", time.time())
    (start.run_folder / "exit.json").write_text(json.dumps({**asdict(record), "start": start.name}))
    assert pod._leave_after(start, 143) == EXIT_START_AGAIN
    assert start.end is not None, "the next pods would wait for those of this start"
    assert start.end.code == 143


def test_a_pod_whose_supervisor_was_ended_by_a_signal_says_so_if_nobody_has_recorded_an_end(
    pod: node.Node, start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "SHOWN_S", 0.0)
    assert pod._leave_after(start, 137) == 137
    assert start.end is None
    assert "a supervisor of this pod was ended by signal 9" in capsys.readouterr().err


def test_a_supervisor_that_starts_after_a_request_to_stop_hears_of_it(
    pod: node.Node, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen
    monkeypatch.setattr("subprocess.Popen", lambda command, **keys: popen(["sleep", "60"]))

    def run(start_rank: Callable[..., Any], *_: object, asked: Callable[[], bool], **_keys: object) -> Any:
        assert asked()
        return start_rank(0, {}).process.wait()

    monkeypatch.setattr(node, "run_ranks", run)
    monkeypatch.setattr(pod, "_end_with", lambda start: None)
    monkeypatch.setattr(pod, "_leave_after", lambda start, code: code)
    pod._on_stop(signal.SIGTERM, None)
    assert pod._run_ranks(start, is_back=False, came=0.0) == -signal.SIGTERM
