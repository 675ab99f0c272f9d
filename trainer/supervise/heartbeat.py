"""A rank's current phase, step, last collective and start, in a small file that its supervisor shares.

The rank writes with `Heartbeat`, without a system call; the supervisor reads with `read` and sends a request
with `request_stop`. Both are on one machine, so they share the clock of `time.monotonic`. No torch.
"""

import math
import mmap
import os
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from trainer.config.phases import Phase
from trainer.run.exit_record import EXIT_DIR, RANK_DIR

HEARTBEAT_FILE = "heartbeat"

Moment = Literal["running", "connected", "prepared", "restored", "stepped"]
"""Moments of a rank's start: its modules are imported; it has joined the others; its model is built; its
state is restored; its first step is done."""

# The fields are: version; phase, its limit, its step, its begin; collectives begun, the last one's name, and
# whether the rank waits in it.
_BLOCK = struct.Struct("=Q12sdqdQ24s?")
_LIMIT_AT = struct.calcsize("=Q12s")
_STOP_AT = _BLOCK.size
_MOMENTS_AT = (_STOP_AT + 8) // 8 * 8
_SIZE = _MOMENTS_AT + 8 * len(get_args(Moment))
_TRIES = 1000


@dataclass(frozen=True)
class RankState:
    """State of a rank as its heartbeat shows it.

    `began` is on the clock of `time.monotonic`; `collectives` counts the collectives that this rank has
    begun.
    """

    phase: str
    limit_s: float
    step: int
    began: float
    collectives: int
    collective: str
    waiting: bool
    """True while the rank is inside the last collective, waiting for other ranks or for data transfer."""

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self.began

    @property
    def steps_done(self) -> float:
        """Number of the last step that is done; infinite once all are."""
        if self.phase == "shutdown":
            return math.inf
        return self.step if self.phase in ("evaluation", "checkpoint") else max(0, self.step - 1)

    @property
    def late(self) -> bool:
        """True if the phase has passed its limit."""
        return self.seconds > self.limit_s


class Heartbeat:
    """Writes the rank's heartbeat.

    Only one thread writes at a time: the loop's, or the backward pass's while the loop's waits for it.
    """

    def __init__(self, memory: mmap.mmap, limits: Mapping[str, float]) -> None:
        self._memory = memory
        self.limits = limits
        """Limits in seconds by phase; a phase without one has no limit.

        They are set once the job is known.
        """
        state = _unpack(memory)
        self._version, self._phase, self._step, self._began = 0, state.phase, state.step, state.began
        self._limit_s = state.limit_s
        self._collectives, self._collective, self._waiting = 0, "", False

    @classmethod
    def open(cls, env: Mapping[str, str]) -> "Heartbeat":
        """Opens the heartbeat file that the supervisor made.

        Without a supervisor, it opens memory that nobody reads.
        """
        if folder := env.get(RANK_DIR):
            with open(Path(folder, HEARTBEAT_FILE), "r+b") as file:
                return cls(mmap.mmap(file.fileno(), _SIZE), {})
        return cls(mmap.mmap(-1, _SIZE), {})

    def begin_phase(self, phase: Phase, step: int = 0) -> None:
        """Records that the rank is in this phase from now on; `step` counts from 1."""
        if phase == "first step":
            self.reach("restored")
        elif self._phase == "first step":
            self.reach("stepped")
        self._phase, self._step, self._began = phase, step, time.monotonic()
        self._limit_s = self.limits.get(phase, math.inf)
        self._write()

    def reach(self, moment: Moment) -> None:
        """Records that this moment of the rank's start is now."""
        struct.pack_into("=d", self._memory, _moment_at(moment), time.monotonic())

    def begin_collective(self, name: str, *, waiting: bool = True) -> None:
        """Records that one more collective has begun; every rank counts the same ones.

        `waiting=False` means that the collective is under way while the rank goes on.
        """
        self._collectives, self._collective, self._waiting = self._collectives + 1, name, waiting
        self._write()

    def set_waiting(self, waiting: bool) -> None:
        """Records whether the rank waits in the last collective."""
        self._waiting = waiting
        self._write()

    @property
    def current_phase(self) -> str:
        """Name of the current phase."""
        return self._phase

    @property
    def remaining_s(self) -> float:
        """Seconds until the phase passes its limit; 0 if it has passed, infinite if there is none."""
        return max(0.0, self._began + self.limits.get(self._phase, math.inf) - time.monotonic())

    @property
    def stop_requested(self) -> bool:
        """True once the supervisor asks the run to stop."""
        return self._memory[_STOP_AT] != 0

    def _write(self) -> None:
        """Writes the block. An odd version number marks it as half written, so that a reader tries again."""
        self._version += 2
        self._memory[0:8] = (self._version - 1).to_bytes(8, "little")
        self._memory[8 : _BLOCK.size] = self._packed()[8:]
        self._memory[0:8] = self._version.to_bytes(8, "little")

    def _packed(self) -> bytes:
        phase, name = self._phase.encode(), self._collective.encode()
        return _BLOCK.pack(
            0, phase, self._limit_s, self._step, self._began, self._collectives, name, self._waiting
        )


def make(folder: Path) -> mmap.mmap:
    """Makes a new heartbeat file and maps it for the supervisor.

    It says that the rank is in phase init from now on, without a limit.
    """
    path = folder / HEARTBEAT_FILE
    path.write_bytes(bytes(_SIZE))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), _SIZE)
    memory[: _BLOCK.size] = _BLOCK.pack(0, b"init", math.inf, 0, time.monotonic(), 0, b"", False)
    return memory


def read(memory: mmap.mmap) -> RankState:
    """Returns the rank's current state.

    A rank that was stopped while it wrote leaves a torn block; it is returned as it is.
    """
    for _ in range(_TRIES):
        before = memory[0:8]
        state = _unpack(memory)
        if before == memory[0:8] and not before[0] & 1:
            return state
    return _unpack(memory)


def moments(memory: mmap.mmap) -> dict[str, float]:
    """Returns the moments that the rank has reached, on the clock of `time.monotonic`."""
    times = {name: struct.unpack_from("=d", memory, _moment_at(name))[0] for name in get_args(Moment)}
    return {name: at for name, at in times.items() if at}


def peek(path: Path) -> RankState:
    """Reads the heartbeat file of another process of this machine.

    Raises OSError or ValueError if there is none.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ) as memory:
        return read(memory)


def limit_init(memory: mmap.mmap, init_s: float) -> None:
    """Sets the limit of init, unless the rank has already written.

    From then on the rank sets its limits itself.
    """
    if memory[0:8] == bytes(8):
        struct.pack_into("=d", memory, _LIMIT_AT, init_s)


def request_stop(memory: mmap.mmap) -> None:
    """Sets the flag that the rank reads as a request to stop."""
    memory[_STOP_AT] = 1


def _unpack(memory: mmap.mmap) -> RankState:
    _, phase, limit_s, step, began, collectives, name, waiting = _BLOCK.unpack(memory[: _BLOCK.size])
    if not began:  # no supervisor made it
        return RankState("init", math.inf, 0, time.monotonic(), 0, "", False)
    return RankState(_text(phase), limit_s, step, began, collectives, _text(name), waiting)


def _moment_at(moment: Moment) -> int:
    return _MOMENTS_AT + 8 * get_args(Moment).index(moment)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def publish_heartbeat(folder: Path, env: Mapping[str, str]) -> None:
    """Links rank 0's heartbeat in `folder` into the exit folder, for the launcher on this machine to read.

    The link takes the place of an earlier generation's.
    """
    if EXIT_DIR in env:
        link = Path(env[EXIT_DIR], HEARTBEAT_FILE)
        beside = link.with_name(f".{HEARTBEAT_FILE}")
        with suppress(OSError):  # the ranks were started from another machine
            os.symlink(folder / HEARTBEAT_FILE, beside)
            os.replace(beside, link)


def published_state(exit_dir: Path) -> tuple[RankState | None, bool]:
    """Returns rank 0's state, and whether its supervisor has begun on this machine.

    A state of None with True means that the supervisor has ended.
    """
    way = exit_dir / HEARTBEAT_FILE
    with suppress(OSError, ValueError):
        return peek(way), True
    return None, way.is_symlink()
