"""A step on two ranks, one core each: Horovod's and that of DistributedDataParallel (DDP), in turns.

Both pairs of ranks live all along; the one that has no turn is stopped, since threads of a library may turn
in circles while they wait.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO

from benchmarks.step_rank import RANKS

LIMIT_S = 120.0
"""Longest wait for the start of ranks, or for one step; then the benchmark ends with what they printed."""


class Pair:
    """Two ranks of a backend."""

    def __init__(self, backend: str, model: str, samples: int) -> None:
        self.name = backend
        self._pids: list[int] = []
        self._lines: list[IO[str]] = []
        self._sockets: list[socket.socket] = []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed at the end of the block
        self._listener = socket.create_server(("127.0.0.1", 0))
        words = ("start", backend, str(self._listener.getsockname()[1]), model, str(samples))
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step_rank", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )

    def __enter__(self) -> "Pair":
        try:
            self._listener.settimeout(1.0)
            limit = time.monotonic() + LIMIT_S
            while len(self._sockets) < RANKS:
                self._accept(limit)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._signal(signal.SIGSTOP)
        return self

    def _accept(self, limit: float) -> None:
        if self._launcher.poll() is not None or time.monotonic() > limit:
            self._fail("did not start")
        with suppress(TimeoutError):
            connection, _ = self._listener.accept()
            self._sockets.append(connection)
            self._lines.append(connection.makefile("rw"))
            self._pids.append(json.loads(self._read(len(self._lines) - 1))["pid"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)  # the session that this side began
        self._launcher.wait()
        for lines in self._lines:
            with suppress(OSError):  # what was not sent yet
                lines.close()
        for connection in (*self._sockets, self._listener):
            connection.close()
        self._log.close()

    def step(self) -> float:
        """Makes one step and returns its seconds on the rank that took longest."""
        self._signal(signal.SIGCONT)
        for lines in self._lines:
            print("step", file=lines, flush=True)
        seconds = [float(self._read(rank)) for rank in range(RANKS)]
        self._signal(signal.SIGSTOP)
        return max(seconds)

    def _read(self, rank: int) -> str:
        ready, _, _ = select.select([self._sockets[rank]], [], [], LIMIT_S)
        line = self._lines[rank].readline() if ready else ""
        if not line:
            self._fail("ended" if ready else f"made no step in {LIMIT_S:g} s")
        return line

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _fail(self, how: str) -> None:
        self._log.seek(0)
        raise SystemExit(f"the ranks of {self.name} {how}:\n{self._log.read()[-3000:]}")


def turns_of(
    pairs: int, model: str, samples: int, in_turns: Callable[[Pair, Pair, int], Sequence[tuple[float, float]]]
) -> Sequence[tuple[float, float]]:
    """Returns the seconds of Horovod and of DDP in each of so many pairs of steps."""
    with Pair("horovod", model, samples) as horovod, Pair("torch", model, samples) as ddp:
        return in_turns(horovod, ddp, pairs)
