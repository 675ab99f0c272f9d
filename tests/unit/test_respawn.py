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


@pytest.mark.parametrize("number", SIGNALS)
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
