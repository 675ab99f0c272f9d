"""One launcher process and all that it starts: a signal to stop is passed on to it, and nothing of it outlives the call. No torch."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

GRACE_S = 10.0
"""Between the first failure or signal and SIGKILL for whatever is left."""
_POLL_S = 0.1
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def supervise(command: Sequence[str], env: Mapping[str, str], exit_dir: Path) -> int:
    """Run a launcher to its end; returns its exit code, or 128 + N where it ended by signal N or one was passed on.

    `exit_dir` is a fresh folder that `env` names: a record in it starts the grace period, and it marks the processes of this launcher,
    for torchrun and mpirun put ranks into sessions of their own, where killing a process group does not reach them.
    """
    with _signals() as received:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent)
        try:
            _wait(process, received, exit_dir)
        finally:
            _end(process, exit_dir)
    code = process.wait()
    if received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects signals instead of acting on them; only the main thread may ask for that."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)

    heeded = [number for number in _STOP if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, collect) for number in heeded}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], received: Sequence[int], exit_dir: Path) -> None:
    """Until the launcher has ended, or its grace period has, or Ctrl-C was pressed twice."""
    deadline: float | None = None
    while process.poll() is None:
        if received and deadline is None:
            process.terminate()  # for SIGINT too: ranks would show a KeyboardInterrupt each
        if deadline is None and (received or any(exit_dir.glob("rank-*.json"))):
            deadline = time.monotonic() + GRACE_S
        if received.count(signal.SIGINT) > 1 or (deadline is not None and time.monotonic() > deadline):
            return
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes], exit_dir: Path) -> None:
    """Leave nothing behind: a launcher that still runs has used up its grace; orphans of one that ended get theirs."""
    if process.poll() is None:
        process.kill()
    else:
        deadline = time.monotonic() + GRACE_S
        _signal_all(_members(exit_dir), signal.SIGTERM)
        while _members(exit_dir) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    _signal_all(_members(exit_dir), signal.SIGKILL)


def _members(exit_dir: Path) -> list[int]:
    """Processes of this user on this machine that have the folder in their environment."""
    mark = os.fsencode(exit_dir)
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if mark in _environ(entry)]


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it ended, or is another user's
        return b""


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _end_with_parent() -> None:
    """In the child before exec: if this process is killed, the launcher gets SIGTERM and ends its ranks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
