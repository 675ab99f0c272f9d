"""Each task of srun runs a supervisor, and runs it again if it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import ended_on_failure
from trainer.launch.ranks.respawn import main

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _signals_as_before() -> object:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return found


def test_a_killed_supervisor_is_started_again_and_then_joins_the_run(
    tmp_path: Path, waits: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = """
    if [ -z "$CLIPSHIP_RESPAWNED" ]; then kill -KILL $$; fi
    [ -e "$1" ] || { touch "$1"; kill -KILL $$; }
    echo "joins, given $2"; exit 7"""
    words = ["sh", "-c", supervisor, "sh", str(tmp_path / "killed-twice"), "a-word"]
    assert main([str(tmp_path), *words]) == 7
    line = "clipship: a supervisor on n1 was killed; it is started again in {} s\n"
    assert capfd.readouterr() == ("joins, given a-word\n", line.format(1) + line.format(2))
    assert waits == [1.0, 2.0]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("exit 124", 124),
        ("exit 137", 137),
        ("kill -TERM $$", 143),
        ("echo x >$0/exit.json; kill -KILL $$", 137),
    ],
    ids=["left", "left as if killed", "asked", "the run has ended"],
)
def test_a_supervisor_that_left_or_was_asked_to_is_not_started_again(
    ends: str, code: int, tmp_path: Path, waits: list[float]
) -> None:
    assert main([str(tmp_path), "sh", "-c", ends, str(tmp_path)]) == code
    assert waits == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_requests_to_stop_are_passed_on(number: signal.Signals, tmp_path: Path) -> None:
    """Slurm signals every process of a step, or under proctrack/cgroup the first one of each task alone."""
    name = number.name.removeprefix("SIG")
    asked = f"trap 'echo asked; exit 75' {name}; echo ready; while :; do sleep 0.05; done"
    words = [sys.executable, "-P", "-m", "trainer.launch.ranks.respawn", str(tmp_path), "sh", "-c", asked]
    with ended_on_failure(subprocess.Popen(words, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        assert process.communicate(timeout=20)[0] == "asked\n"
        assert process.returncode == 75


def test_a_request_to_stop_that_comes_while_nothing_runs_reaches_the_next_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the wait before the supervisor is started again."""
    monkeypatch.setattr(time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    first = tmp_path / "first"
    kills_itself = f"[ -e {first} ] && exec sleep 60; touch {first}; kill -KILL $$"
    assert main([str(tmp_path), "sh", "-c", kills_itself]) == 128 + signal.SIGTERM


@pytest.mark.parametrize("module", ["trainer.rank", "trainer.supervise.main", "trainer.launch.ranks.respawn"])
def test_supervisor_imports_neither_torch_nor_the_jobs_model(module: str) -> None:
    """Every rank of every node has them, so that they stay light."""
    heavy = f"import sys, {module}; print({{'torch', 'numpy', 'pydantic', 'click'}} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
