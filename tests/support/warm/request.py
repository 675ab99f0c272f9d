"""Message to a warm interpreter that has what a new process gets from the one that starts it.

It holds all that `exec` would hand on, since a fork of the warm interpreter has its own instead.
"""

import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_RANK = "rank_start"
_LIMITS = tuple(
    getattr(resource, f"RLIMIT_{name}")
    for name in ("NOFILE", "CORE", "AS", "MEMLOCK", "NPROC", "FSIZE", "STACK", "DATA")
)
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


@dataclass(frozen=True)
class Request:
    """A command that a warm interpreter runs in a fork.

    Its descriptors travel beside it in the order of `places`, the numbers that they get. One more is closed
    as soon as the command begins.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    places: Sequence[int]
    new_session: bool
    umask: int
    preexec: Callable[[], object] | None
    group: int
    ignored: Sequence[int]
    blocked: Sequence[int]
    limits: Mapping[int, tuple[int, int]]
    cores: Sequence[int]

    @property
    def starts_others(self) -> bool:
        """True unless it is a rank under its supervisor, which starts nothing that a fork could be."""
        return self.module.rpartition(".")[2] != _RANK

    @property
    def safe_path(self) -> bool:
        """True if the working folder is not searched for modules."""
        return self.command[1] == "-P"

    @property
    def module(self) -> str:
        return self.command[self.command.index("-m") + 1]

    @property
    def words(self) -> Sequence[str]:
        return self.command[self.command.index("-m") + 2 :]

    def join_group(self) -> None:
        if self.new_session:
            os.setsid()
        elif os.getpgrp() != self.group:
            os.setpgid(0, self.group)

    def take(self) -> None:
        """Gives this process what the request says, but for its group and its descriptors."""
        os.chdir(self.cwd)
        if self.umask >= 0:
            os.umask(self.umask)
        for kind, limit in self.limits.items():
            if resource.getrlimit(kind) != limit:
                resource.setrlimit(kind, limit)
        if sorted(os.sched_getaffinity(0)) != self.cores:
            os.sched_setaffinity(0, self.cores)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in self.ignored else signal.SIG_DFL)
        if self.preexec is not None:
            self.preexec()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python does where it begins
            signal.signal(number, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def inherited(blocked: Sequence[int]) -> dict[str, Any]:
    """Returns what a child of this process inherits, as fields of `Request`; `blocked` signals are given."""
    return {
        "group": os.getpgrp(),
        "ignored": [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN],
        "blocked": blocked,
        "limits": {kind: resource.getrlimit(kind) for kind in _LIMITS},
        "cores": sorted(os.sched_getaffinity(0)),
    }
