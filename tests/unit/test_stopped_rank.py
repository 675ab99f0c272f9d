"""A rank that a signal has stopped, on a clock of the test, and the state of a real process."""

import os
import signal
import subprocess

from trainer.supervise.rank.rank_report import STOPPED_S, StoppedRank, is_stopped


def test_only_a_process_that_stays_stopped_is_reported() -> None:
    now = 0.0
    watch = StoppedRank(lambda: now)
    assert not watch.is_lasting(1, is_stopped=True)
    now = STOPPED_S - 0.1
    assert not watch.is_lasting(1, is_stopped=True)
    now = STOPPED_S
    assert watch.is_lasting(1, is_stopped=True)
    assert not watch.is_lasting(1, is_stopped=False)  # somebody sent SIGCONT
    assert not watch.is_lasting(1, is_stopped=True)


def test_another_process_and_a_suspended_supervisor_begin_anew() -> None:
    now = 0.0
    watch = StoppedRank(lambda: now)
    watch.is_lasting(1, is_stopped=True)
    now = STOPPED_S
    assert not watch.is_lasting(2, is_stopped=True)
    now = 2 * STOPPED_S
    watch.forget()
    assert not watch.is_lasting(2, is_stopped=True)
    now = 3 * STOPPED_S
    assert watch.is_lasting(2, is_stopped=True)


def test_stopped_process_is_told_from_one_that_sleeps() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(process.pid)
