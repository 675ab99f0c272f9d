"""What a rank is doing, in a small file that it shares with its supervisor: phase, step, last collective, all without a system call.

The rank writes `Pulse`, the supervisor reads `read`, and asks through `ask_to_stop`. Both are on one machine, so the clock of
`time.monotonic` is the same. No torch.
"""

import math
import mmap
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Phase = Literal["init", "first step", "step", "data", "evaluation", "checkpoint", "shutdown"]

RANK_DIR = "CLIPSHIP_RANK_DIR"
"""The folder in which a supervisor and its rank meet; not set where a rank has no supervisor."""
PULSE_FILE = "pulse"

_BLOCK = struct.Struct("=Q12sdqdQ24s?")  # version; phase, its limit, its step, its begin; collectives begun, the last one's name, in it?
_LIMIT_AT = struct.calcsize("=Q12s")
_STOP_AT = _BLOCK.size
_SIZE = _STOP_AT + 1
_TRIES = 1000


@dataclass(frozen=True)
class Beat:
    """A pulse as it was read. `began` is on the clock of `time.monotonic`; `collectives` counts those that this rank has begun."""

    phase: str
    limit_s: float
    step: int
    began: float
    collectives: int
    collective: str
    waiting: bool
    """Inside the last collective: waiting for other ranks, or for the wire."""

    @property
    def seconds(self) -> float:
        """How long the phase has lasted."""
        return time.monotonic() - self.began

    @property
    def late(self) -> bool:
        """The phase has passed its limit."""
        return self.seconds > self.limit_s


class Pulse:
    """The writing side. One thread writes at a time: the loop's, which the backward pass's thread stands in for."""

    def __init__(self, memory: mmap.mmap, limits: Mapping[str, float]) -> None:
        self._memory = memory
        self.limits = limits
        """Seconds by phase; a phase without one has no limit. Set once the job is known."""
        beat = _unpack(memory)
        self._version, self._phase, self._step, self._began = 0, beat.phase, beat.step, beat.began
        self._limit_s = beat.limit_s
        self._collectives, self._collective, self._waiting = 0, "", False

    @classmethod
    def open(cls, env: Mapping[str, str]) -> "Pulse":
        """The pulse that the supervisor made, or one that nobody reads where there is none."""
        if folder := env.get(RANK_DIR):
            with open(Path(folder, PULSE_FILE), "r+b") as file:
                return cls(mmap.mmap(file.fileno(), _SIZE), {})
        return cls(mmap.mmap(-1, _SIZE), {})

    def phase(self, phase: Phase, step: int = 0) -> None:
        """From now on the rank is in this phase; `step` counts from 1."""
        self._phase, self._step, self._began = phase, step, time.monotonic()
        self._limit_s = self.limits.get(phase, math.inf)
        self._write()

    def collective(self, name: str, *, waiting: bool = True) -> None:
        """One more collective has begun; every rank counts the same ones. `waiting` False: it is under way, the rank goes on."""
        self._collectives, self._collective, self._waiting = self._collectives + 1, name, waiting
        self._write()

    def waiting(self, waiting: bool) -> None:
        """Whether the rank waits in the last collective."""
        self._waiting = waiting
        self._write()

    @property
    def now(self) -> str:
        """The phase."""
        return self._phase

    @property
    def left_s(self) -> float:
        """Until the phase passes its limit; 0 where it has, infinite where it has none."""
        return max(0.0, self._began + self.limits.get(self._phase, math.inf) - time.monotonic())

    @property
    def stop_asked(self) -> bool:
        """The supervisor asks the run to stop."""
        return self._memory[_STOP_AT] != 0

    def _write(self) -> None:
        """An odd version says that the block is being written: the reader tries again."""
        self._version += 2
        self._memory[0:8] = (self._version - 1).to_bytes(8, "little")
        self._memory[8 : _BLOCK.size] = self._packed()[8:]
        self._memory[0:8] = self._version.to_bytes(8, "little")

    def _packed(self) -> bytes:
        phase, name = self._phase.encode(), self._collective.encode()
        return _BLOCK.pack(0, phase, self._limit_s, self._step, self._began, self._collectives, name, self._waiting)


def make(folder: Path) -> mmap.mmap:
    """The supervisor's side of a new pulse: in init, from now on, without a limit yet."""
    path = folder / PULSE_FILE
    path.write_bytes(bytes(_SIZE))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), _SIZE)
    memory[: _BLOCK.size] = _BLOCK.pack(0, b"init", math.inf, 0, time.monotonic(), 0, b"", False)
    return memory


def read(memory: mmap.mmap) -> Beat:
    """What the rank is doing. Where the rank stopped in the middle of writing, the block as it stands."""
    for _ in range(_TRIES):
        before = memory[0:8]
        beat = _unpack(memory)
        if before == memory[0:8] and not before[0] & 1:
            return beat
    return _unpack(memory)


def limit_init(memory: mmap.mmap, init_s: float) -> None:
    """Unless the rank has already said something: from then on it knows its limits itself."""
    if memory[0:8] == bytes(8):
        struct.pack_into("=d", memory, _LIMIT_AT, init_s)


def ask_to_stop(memory: mmap.mmap) -> None:
    """The rank finds it when it next looks."""
    memory[_STOP_AT] = 1


def _unpack(memory: mmap.mmap) -> Beat:
    _, phase, limit_s, step, began, collectives, name, waiting = _BLOCK.unpack(memory[: _BLOCK.size])
    if not began:  # nobody made it: the rank has no supervisor
        return Beat("init", math.inf, 0, time.monotonic(), 0, "", False)
    return Beat(_text(phase), limit_s, step, began, collectives, _text(name), waiting)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
