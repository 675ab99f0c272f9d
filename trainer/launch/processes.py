"""One launcher process and all that it starts: a signal to stop is passed on, and nothing of it outlives the call. No torch."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

GRACE_S = 10.0
"""Between the first failure, or a signal that nobody heeds, and SIGKILL for whatever is left."""
_KILL_S = 5.0
"""For a killed process to be gone: one that waits for a far disk is not at once."""
_POLL_S = 0.1
_LOOK_S = 1.0  # the run folder may be far away
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def supervise(
    command: Sequence[str],
    env: Mapping[str, str],
    exit_dir: Path,
    ask: Callable[[int], bool],
    unheard: int = signal.SIGTERM,
    ended: Callable[[], bool] = lambda: False,
    stdin: int | None = subprocess.DEVNULL,
) -> int:
    """Run a launcher to its end; returns its exit code, or 128 + N where it ended by signal N, or after one that no rank heeded.

    `exit_dir` is a fresh folder that `env` names: a record in it starts the grace period, and it marks the processes of this launcher,
    for torchrun and mpirun put ranks into sessions of their own, where killing a process group does not reach them.
    `ended` says, where ranks leave their word elsewhere, that the run is over; it is asked once a second, and starts the grace period too.
    `ask` passes a signal on to the ranks' supervisors; where it returns False the launcher gets `unheard`, and its grace period starts.
    `stdin` None is this process's own.
    """
    with _signals() as received:
        process = subprocess.Popen(command, env=env, stdin=stdin, start_new_session=True, preexec_fn=_end_with_parent)
        try:
            _Wait(process, received, exit_dir, ask, unheard, ended).until_end()
        finally:
            _end(process, exit_dir)
    code = process.wait()
    if received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects signals instead of acting on them; only the main thread may ask for that.

    After one that was heard no other has a meaning: schedulers repeat themselves, also while this process says how the run ended.
    """
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
            signal.signal(number, signal.SIG_IGN if received else handler)


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Whatever launchers and ranks say inside goes to stderr: stdout is for the result."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


class _Wait:
    """For the launcher's end, or the end of its grace period."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        received: Sequence[int],
        exit_dir: Path,
        ask: Callable[[int], bool],
        unheard: int,
        ended: Callable[[], bool],
    ) -> None:
        self._process, self._received, self._exit_dir = process, received, exit_dir
        self._ask, self._unheard, self._ended = ask, unheard, ended
        self._passed_on = 0
        self._looked = 0.0
        self._deadline: float | None = None

    def until_end(self) -> None:
        """A run that was asked to stop has no deadline here: its supervisors bound it by the job's own limits."""
        while self._process.poll() is None:
            while self._passed_on < len(self._received):
                self._pass_on(self._received[self._passed_on])
                self._passed_on += 1
            if any(self._exit_dir.glob("rank-*.json")) or self._over_elsewhere():
                self._end_soon()
            if self._deadline is not None and time.monotonic() > self._deadline:
                return
            time.sleep(_POLL_S)

    def _over_elsewhere(self) -> bool:
        if self._deadline is not None or time.monotonic() - self._looked < _LOOK_S:
            return False
        self._looked = time.monotonic()
        return self._ended()

    def _pass_on(self, number: int) -> None:
        """The supervisors tell a repeated signal from a second one. Without them, the second Ctrl-C has no more patience."""
        if self._ask(number):
            return
        self._process.send_signal(signal.SIGTERM if self._passed_on else self._unheard)
        self._end_soon()
        if self._received.count(signal.SIGINT) > 1:
            self._deadline = 0.0

    def _end_soon(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + GRACE_S


def _end(process: subprocess.Popen[bytes], exit_dir: Path) -> None:
    """Leave nothing behind: a launcher that still runs has used up its grace; orphans of one that ended get theirs."""
    if process.poll() is None:
        process.kill()
    else:
        deadline = time.monotonic() + GRACE_S
        _signal_all(_members(exit_dir), signal.SIGTERM)
        while _members(exit_dir) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    deadline = time.monotonic() + _KILL_S
    while (left := _members(exit_dir)) and time.monotonic() < deadline:
        _signal_all(left, signal.SIGKILL)
        time.sleep(_POLL_S)


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
