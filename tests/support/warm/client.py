"""Lets `subprocess` ask a warm interpreter for `python -m MODULE` instead of executing a new one.

A command that a warm interpreter cannot give is executed as always; see `Warm.gives`.
"""

import ctypes
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.warm.request import Request, inherited
from trainer.supervise.rank.fork_server import may_fork
from trainer.sysinfo import forks

_PACKAGES = ("trainer.", "tests.support.", "tests.listeners")
_ANSWER_S = 30.0
_PR_GET_CHILD_SUBREAPER = 37  # linux/prctl.h
_READ_LATE = re.compile(
    r"(FAULT|GLOO|OMPI_MCA|PRTE_MCA)_"
    r"|(COLUMNS|CUDA_VISIBLE_DEVICES|FAULT|HF_HUB_OFFLINE|LINES|LOCK_WAIT_S|NAP_S|NO_COLOR|OLDPWD|OMP_NUM_THREADS|PATH|PWD"
    r"|JOB_COMPLETION_INDEX|PYTEST_CURRENT_TEST|PYTHONPATH|PYTHONUNBUFFERED|SHLVL|TERM|TMPDIR|TORCH_GLOO_LAZY_INIT"
    r"|XDG_STATE_HOME|_)$"
)
"""Names of variables that are read when they are needed, or that `server` heeds where a process begins."""


class Warm:
    """A warm interpreter that is a child of this process."""

    def __init__(self, channel: socket.socket, env: Mapping[str, str]) -> None:
        """`env` is the one in which it has imported its modules."""
        self._channel, self._env = channel, dict(env)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends it."""
        self._channel.close()

    def gives(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Returns whether a fork is what a new interpreter would be.

        It is one for a module of ours, unless a library has read a variable with another value when it was
        imported, or PYTHONPATH has folders with other modules.
        """
        words = command[2:] if command[1:2] == ["-P"] else command[1:]
        if command[0] != sys.executable or words[:1] != ["-m"] or not words[1].startswith(_PACKAGES):
            return False
        late = ({n: v for n, v in each.items() if not _READ_LATE.match(n)} for each in (self._env, env))
        return _folders(env) <= _folders(self._env) and may_fork(*late)

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """Returns the number of the new process, a child of this one. Raises OSError."""
        message = pickle.dumps(request)
        with self._lock:
            before = _is_subreaper()
            forks.adopt_orphans()
            try:
                self._channel.settimeout(_ANSWER_S)
                socket.send_fds(self._channel, [message], list(descriptors))
                return int(self._channel.recv(64))
            finally:
                forks.adopt_orphans(before)


def _folders(env: Mapping[str, str]) -> set[str]:
    return set(filter(None, env.get("PYTHONPATH", "").split(os.pathsep)))


def _is_subreaper() -> bool:
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)


class _Start(NamedTuple):
    """Arguments of `_posixsubprocess.fork_exec`, which `subprocess.Popen` calls; -1 is none."""

    args: Sequence[str | bytes]
    executables: Sequence[bytes]
    close_fds: bool
    pass_fds: Sequence[int]
    cwd: str | None
    env: Sequence[bytes] | None
    stdin: int
    stdin_writer: int
    stdout_reader: int
    stdout: int
    stderr_reader: int
    stderr: int
    error_reader: int
    error: int
    restore_signals: bool
    new_session: bool
    group: int
    gid: int | None
    gids: Sequence[int] | None
    uid: int | None
    umask: int
    preexec: Callable[[], object] | None

    @property
    def is_plain(self) -> bool:
        """True without any wish that `Request` does not know."""
        others = (self.group, self.gid, self.gids, self.uid)
        return self.close_fds and self.restore_signals and others == (-1, None, None, None)

    def request(self, blocked: Sequence[int]) -> Request:
        """Returns it for a process in which the signals `blocked` are blocked. Raises OSError."""
        folder = Path(self.cwd or ".").resolve(strict=True)
        entries = [os.fsdecode(entry).partition("=") for entry in self.env or ()]
        return Request(
            command=[os.fsdecode(word) for word in self.args],
            env={name: value for name, _, value in entries} if self.env is not None else dict(os.environ),
            cwd=str(folder),
            places=(0, 1, 2, *self._passed),
            new_session=self.new_session,
            umask=self.umask,
            preexec=self.preexec,
            **inherited(blocked),
        )

    @property
    def descriptors(self) -> list[int]:
        streams = enumerate((self.stdin, self.stdout, self.stderr))
        return [number if number != -1 else own for own, number in streams] + [*self._passed, self.error]

    @property
    def _passed(self) -> list[int]:
        return [number for number in self.pass_fds if number != self.error]


_execute: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
_warm: Warm | None = None


def use(warm: Warm | None) -> None:
    """Lets this process ask `warm` from now on; with None it executes every command."""
    global _warm
    _warm = warm
    subprocess._fork_exec = _fork_or_execute if warm else _execute  # type: ignore[attr-defined]


def current() -> Warm | None:
    return _warm


def _forget() -> None:
    """Called in a fork of this process, which is not the parent of the warm interpreter."""
    if _warm is not None:
        _warm.close()
        use(None)


os.register_at_fork(after_in_child=_forget)


def _fork_or_execute(*arguments: Any) -> int:
    """Takes the place of `_posixsubprocess.fork_exec`: the same arguments, the same result."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with suppress(OSError, AttributeError, TypeError, pickle.PicklingError):
            start = _Start(*arguments[: len(_Start._fields)])
            request = start.request(list(blocked))
            if _warm is not None and start.is_plain and _warm.gives(request.command, request.env):
                return _warm.fork(request, start.descriptors)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return _execute(*arguments)
