"""The supervisor's side of the fork server: a process that has imported what a rank needs and forks ranks.

The first rank of a supervisor leaves a copy of itself behind as soon as its modules are imported; see
`trainer.supervise.rank.rank_start`. That copy, the fork server, forks the rank of each later generation
within milliseconds. A rank that it forks is a child of the supervisor like any other. No torch.
"""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from trainer.errors import EXIT_FAILED
from trainer.sysinfo.children import is_child, reap
from trainer.sysinfo.forks import adopt_orphans
from trainer.world.rank_process import RankProcess, start_rank

CHANNEL = "CLIPSHIP_FORK_SERVER"
"""Variable with the number of the socket over which a fork server gets requests."""
KEEP, WAIT = b"keep", b"wait"
"""First message to a starting rank: leave a fork server behind, or be one and start no rank now."""

_ANSWER_S = 2.0
"""Longest wait for a fork server, in seconds: less than other supervisors wait for a silent one."""
_POLL_S = 0.01
# Variables that the trainer and the backends read when they connect, and not when they are imported.
_MAY_DIFFER = re.compile(
    r"(CLIPSHIP|HOROVOD|TORCHELASTIC|TORCH_NCCL|TORCH_FR|NCCL)_"
    r"|(MASTER_(ADDR|PORT)|RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)$"
)


class ForkServer:
    """Starts ranks of one command: a new process while no fork server is ready, else a fork of that."""

    def __init__(self, command: Sequence[str], *, use: bool = True) -> None:
        """Starts nothing yet. Without `use`, every rank is a new process."""
        self._command, self._use = command, use
        self._channel: socket.socket | None = None
        self._env: Mapping[str, str] = {}
        self._pid = 0
        self._wanted = False
        self._spare: subprocess.Popen[bytes] | None = None

    def start(self, env: Mapping[str, str]) -> RankProcess:
        """Starts a rank with the environment. Raises OSError if the process cannot be started."""
        return self._fork(env) or self._start_anew(env)

    def keep_if(self, wanted: bool) -> None:
        """Lets the rank that is starting, and others after it, leave a fork server behind if `wanted`."""
        self._wanted = wanted
        if wanted:
            self._send(KEEP)
        else:
            self.close()

    def fill(self, env: Mapping[str, str]) -> None:
        """Starts a fork server and no rank, for a supervisor that may need one later."""
        self._wanted = True
        if self._channel is None:
            self._spare = self._start_anew(env, WAIT)

    def close(self) -> None:
        """Ends the fork server, so that no process of it is left."""
        if self._channel is not None:
            self._is_ready()  # it may have come just now, and then has an id
            self._channel.close()  # one that is still to come finds this end closed
            self._channel = None
        if self._pid:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            reap(-self._pid)  # a process between it and a rank that it could not wait for any more
        if self._spare is not None:
            self._spare.kill()
            self._spare.wait()
        self._pid, self._spare = 0, None

    def _start_anew(self, env: Mapping[str, str], order: bytes = KEEP) -> "subprocess.Popen[bytes]":
        """Starts a rank from nothing, which can leave a fork server behind."""
        self.close()
        if not self._use or not adopt_orphans():
            return start_rank(self._command, env)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            variables = {**env, CHANNEL: str(theirs.fileno())}
            try:
                rank = start_rank(self._command, variables, (theirs.fileno(),))
            except BaseException:
                ours.close()
                raise
        self._channel, self._env = ours, dict(env)
        if self._wanted:
            self._send(order)
        return rank

    def _fork(self, env: Mapping[str, str]) -> "AdoptedRank | None":
        """Lets the fork server fork a rank; returns None if there is no fork server that could."""
        if self._channel is None or not self._is_ready() or not may_fork(self._env, env):
            return None
        changed = {name: value for name, value in env.items() if self._env.get(name) != value}
        removed = [name for name in self._env if name not in env]
        if not self._send(json.dumps({"set": changed, "unset": removed}).encode()):
            return None
        answer = self._receive(_ANSWER_S)
        if answer is None:  # a rank that was forked all the same says so now or never
            os.kill(self._pid, signal.SIGKILL)
            answer = self._receive(_ANSWER_S)
        return AdoptedRank(int(answer)) if answer else None

    def _is_ready(self) -> bool:
        """Returns whether a fork server waits for requests; its first message has its process id."""
        if not self._pid and self._channel is not None:
            self._pid = int(self._receive(0.0) or 0)
        return bool(self._pid)

    def _send(self, message: bytes) -> bool:
        """Sends a message; returns False if it cannot, as when the other side is gone."""
        try:
            return self._channel is not None and bool(self._channel.send(message))
        except OSError:
            return False

    def _receive(self, timeout_s: float) -> bytes | None:
        """Returns a message, b"" if the other side is gone, and None if none came in time."""
        assert self._channel is not None
        self._channel.settimeout(timeout_s)
        try:
            return self._channel.recv(64)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError:
            return b""
        finally:
            self._channel.settimeout(_ANSWER_S)


class AdoptedRank:
    """Process that a fork server forked for this one; it has the methods of Popen that a supervisor uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number after a signal, or None while it runs."""
        if self.returncode is None:
            self.returncode = reap(self.pid).get(self.pid)
            if self.returncode is None and not is_child(self.pid):
                self.returncode = EXIT_FAILED  # somebody else has taken note of its end
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(_POLL_S)
        return code


def may_fork(of_fork_server: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Returns whether a rank with the environment `wanted` may be a fork of a fork server with another one.

    Libraries read some variables, such as OMP_NUM_THREADS, only once, when they are imported.
    """
    names = of_fork_server.keys() | wanted.keys()
    return all(_MAY_DIFFER.match(name) for name in names if of_fork_server.get(name) != wanted.get(name))
