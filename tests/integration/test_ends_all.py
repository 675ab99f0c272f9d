"""A run of which every process is dead, so that none could record the end.

`status` and `logs` say so, and the command that they name resumes the run.
"""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.ends import CLIPSHIP, begin, ranks_left, sigkill, starts
from tests.support.processes import until
from tests.support.runs import clipship, kill_tree


@pytest.mark.fault("everything SIGKILLed at once: launcher, supervisors, ranks")
@pytest.mark.fault("everything SIGKILLed at once: launcher, supervisors, ranks", goes_on=True)
@starts(CLIPSHIP)
def test_run_that_was_killed_as_a_whole_is_dead_and_goes_on(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    running = begin(tmp_path, backend, launcher, steps=100_000)
    running.reached(5)
    alive = clipship("status", running.folder).stdout
    assert "time left" in alive
    assert "dead" not in alive
    sigkill([running.process.pid, *(pid for pid in ranks_left(running) if pid != running.process.pid)])
    running.process.communicate(timeout=100)
    until(lambda: not ranks_left(running))
    assert not (running.folder / "exit.json").exists()
    found = clipship("status", tmp_path / "job.toml").stdout
    assert re.search(
        rf"dead +since 20.* ago: its process \d+ on {re.escape(os.uname().nodename)} is gone", found
    ), found
    assert "time left" not in found
    step = max(
        int(path.name.removeprefix("step-"))
        for path in (running.folder / "checkpoints").glob("step-*")
        if (path / "manifest.json").exists()
    )
    assert f"`clipship resume {running.folder}`; it resumes at step {step}" in found
    followed = clipship("logs", "-f", running.folder, code=None)
    assert "step      5/" in followed.stdout
    assert "the run has died" in followed.stderr
    again = begin(tmp_path, backend, launcher, steps=100_000)
    log = running.folder / "logs" / "rank-00000.log"
    try:
        until(lambda: f"start        step {step}, from" in log.read_text(), again.process)
        again.process.send_signal(signal.SIGTERM)
        again.end(75)
    finally:
        kill_tree(again.process.pid)  # a test that is out of time leaves no run behind
    assert f"start        step {step}, from" in log.read_text()
