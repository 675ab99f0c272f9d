"""Supervises one launcher process and everything it starts.

A signal to stop is passed on, and no process outlives the call. Imports no torch.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from trainer.supervise.network.link import REPEAT_S
from trainer.sysinfo.children import processes_with, signal_all
from trainer.sysinfo.parent import signal_with_parent
from trainer.sysinfo.signals import SIGNALS

GRACE_S = 10.0
"""Seconds between the first failure, or a signal that no rank receives, and SIGKILL for all remaining
processes."""
SECOND_S = 3.0
"""Seconds that the supervisors have for their end after the second Ctrl-C."""
_KILL_S = 5.0
"""Seconds to wait until killed processes are gone; one that waits for a remote disk takes a while."""
_POLL_S = 0.1
_INSPECT_S = 1.0  # reading the run folder may be slow


def supervise(
    command: Sequence[str],
    env: Mapping[str, str],
    exit_dir: Path,
    request_stop: Callable[[int], bool],
    fallback_signal: int = signal.SIGTERM,
    ended: Callable[[], bool] = lambda: False,
    stdin: int | None = subprocess.DEVNULL,
    signal_line: Callable[[int, int], str] = lambda number, times: "",
) -> int:
    """Run a launcher to its end and return its exit code.

    The code is 128 + N if this process received signal N, or if the launcher ended by it.

    `exit_dir` is a fresh folder that `env` names. It marks the processes of this launcher, because mpirun
    puts ranks into their own sessions, where killing a process group does not reach them. `ended` says that
    the run is over, which starts the grace period; it is called once a second. `request_stop` passes a signal
    on to the ranks' supervisors; if it returns False, the launcher gets `fallback_signal`, and its grace
    period starts.

    `stdin` None is this process's own. `signal_line` returns a line for people, which is printed before a
    signal has any other effect; it is called inside the signal handler, with the signal's number and its
    count, and must not block.
    """
    with _signals(signal_line) as received:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=stdin,
            start_new_session=True,
            # if this process is killed, the launcher ends its ranks
            preexec_fn=partial(signal_with_parent, signal.SIGTERM),
        )
        try:
            _Wait(process, received, request_stop, fallback_signal, ended).until_end()
        finally:
            _end(process, exit_dir)
    code = process.wait()
    if received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


@contextmanager
def _signals(signal_line: Callable[[int, int], str]) -> Iterator[list[int]]:
    """Collects signals instead of acting on them; in any thread but the main one it collects none.

    After a signal was received, later ones are ignored at the end: schedulers repeat signals, even while this
    process reports how the run ended.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if line := signal_line(number, received.count(number)):
            with suppress(OSError):
                # Not print, which the signal may have interrupted. A terminal has just shown ^C.
                os.write(2, f"{chr(10) if os.isatty(2) else ''}{line}\n".encode())

    # nohup has SIGHUP ignored, and it stays so
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, collect) for number in heeded}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if received else handler)


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Sends everything that launchers and ranks print inside the block to stderr.

    stdout is for the result.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def is_second(received: Sequence[int], since_first_s: float) -> bool:
    """Returns whether the last signal is a Ctrl-C after another one, and is meant.

    At a keyboard it always is; elsewhere launchers and schedulers send one request several times.
    """
    again = received[-1] == signal.SIGINT and signal.SIGINT in received[:-1]
    return again and (os.isatty(0) or since_first_s > REPEAT_S)


@dataclass
class _Wait:
    """Waits for the launcher's end, or for the end of its grace period."""

    process: subprocess.Popen[bytes]
    received: Sequence[int]
    request_stop: Callable[[int], bool]
    fallback_signal: int
    ended: Callable[[], bool]
    passed_on: int = 0
    first_at: float = 0.0
    """Time of the first signal."""
    inspected: float = 0.0
    deadline: float | None = None

    def until_end(self) -> None:
        """Wait until the end.

        A run that was asked to stop has no deadline here: its supervisors enforce the job's own limits.
        """
        while self.process.poll() is None:
            while self.passed_on < len(self.received):
                self._pass_on(self.received[self.passed_on])
                self.passed_on += 1
            if self._is_over():
                self._end_soon()
            if self.deadline is not None and time.monotonic() > self.deadline:
                return
            time.sleep(_POLL_S)

    def _is_over(self) -> bool:
        if self.deadline is not None or time.monotonic() - self.inspected < _INSPECT_S:
            return False
        self.inspected = time.monotonic()
        return self.ended()

    def _pass_on(self, number: int) -> None:
        """Pass the signal on.

        The supervisors distinguish a repeated signal from a second one. The second Ctrl-C ends the wait in
        any case: at once if they cannot be reached, else after the SECOND_S that they get for their own end.
        """
        now = time.monotonic()
        self.first_at = self.first_at or now
        so_far = self.received[: self.passed_on + 1]
        if not self.request_stop(number):
            self.process.send_signal(signal.SIGTERM if self.passed_on else self.fallback_signal)
            self._end_soon()
            if so_far.count(signal.SIGINT) > 1:
                self.deadline = 0.0
        elif is_second(so_far, now - self.first_at):
            self.deadline = now + SECOND_S

    def _end_soon(self) -> None:
        if self.deadline is None:
            self.deadline = time.monotonic() + GRACE_S


def _end(process: subprocess.Popen[bytes], exit_dir: Path) -> None:
    """End all remaining processes.

    A launcher that still runs has used up its grace period and is killed; orphans of one that has ended get
    theirs first.
    """
    if process.poll() is None:
        process.kill()
    else:
        deadline = time.monotonic() + GRACE_S
        signal_all(_members(exit_dir), signal.SIGTERM)
        while _members(exit_dir) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    deadline = time.monotonic() + _KILL_S
    while (left := _members(exit_dir)) and time.monotonic() < deadline:
        signal_all(left, signal.SIGKILL)
        time.sleep(_POLL_S)


def _members(exit_dir: Path) -> list[int]:
    """Returns the processes of this user on this machine whose environment names the folder."""
    return processes_with(os.fsencode(exit_dir), "environ")
