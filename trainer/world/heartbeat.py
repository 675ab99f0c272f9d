"""A rank's current phase, step, last collective and start, in a small file that its supervisor shares.

The rank writes with `Heartbeat`, without a system call; the supervisor reads with `read` and sends a request
with `request_stop`. Both are on one machine, so they share the clock of `time.monotonic`. No torch.
"""

import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from trainer.config.phases import LIMIT_KEYS, Phase, Stage
from trainer.run.exit_record import EXIT_DIR, RANK_DIR
from trainer.world.learned_limits import LEARNED, WAIT, Basis, Limit, LimitLearner

HEARTBEAT_FILE = "heartbeat"

Moment = Literal["running", "connected", "prepared", "restored", "stepped"]
"""Moments of a rank's start: its modules are imported; it has joined the others; its model is built; its
state is restored; its first step is done."""

# The fields are: version; phase, its limit, its step, its begin; collectives begun, the last one's name, and
# whether the rank waits in it; the configured limit of the phase, the begin of the last collective, the limit
# of a wait in it; the number of ranks with which limits are learned; for each of LEARNED, count and
# percentiles of its durations.
_BLOCK = struct.Struct("=Q12sdqdQ24s?dddQ" + len(LEARNED) * "Qdd")
_LIMIT_AT = struct.calcsize("=Q12s")
_STOP_AT = _BLOCK.size
_MOMENTS_AT = (_STOP_AT + 8) // 8 * 8
_LEASE = struct.Struct("=dd")  # time of the last renewal; seconds for which it holds, 0 if there is no lease
_LEASE_AT = _MOMENTS_AT + 8 * len(get_args(Moment))
_STAGE = struct.Struct("=16sd")  # name of the stage of init, and its begin
_STAGE_AT = _LEASE_AT + _LEASE.size
_SIZE = _STAGE_AT + _STAGE.size
_FIRST_STAGE: Stage = "loading torch"
_TRIES = 1000


def _numbers(bases: Iterable[Basis]) -> tuple[float, ...]:
    return tuple(number for basis in bases for number in (basis.count, basis.p99_s, basis.p999_s))


_NOTHING_LEARNED = _numbers(len(LEARNED) * [Basis()])


@dataclass(frozen=True)
class RankState:
    """State of a rank as its heartbeat showed it at `now`.

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
    ceiling_s: float = math.inf
    """The configured limit of the phase; a learned `limit_s` is below it."""
    waiting_since: float = 0.0
    wait_limit_s: float = math.inf
    """Limit of a wait in one collective within the phase, on the same clock as `began`."""
    learned: Mapping[str, Basis] = field(default_factory=dict)
    """Durations that the rank has seen so far, for each of `LEARNED`."""
    ranks: int = 0
    """Number of ranks with which it has learned that."""
    stage: str = ""
    """Name of what the rank does or did last in the phase init; see `Stage`."""
    stage_began: float = 0.0
    now: float = field(default_factory=lambda: time.monotonic())

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return self.now - self.began

    @property
    def steps_done(self) -> float:
        """Number of the last step that is done; infinite once all are."""
        if self.phase == "shutdown":
            return math.inf
        return self.step if self.phase in ("evaluation", "checkpoint") else max(0, self.step - 1)

    @property
    def late(self) -> bool:
        """True if the phase has passed its limit, or a wait in a collective its own."""
        return self.seconds > self.limit_s or self.waits_too_long

    @property
    def waits_too_long(self) -> bool:
        """True if a wait in a collective has passed the limit that was learned for it."""
        return self.waiting and self.now - self.waiting_since > self.wait_limit_s

    @property
    def late_text(self) -> str:
        """The limit that has passed, in words, and what it was learned from."""
        where = f"{self.phase}, step {self.step}," if self.step else self.phase
        key = f"timeouts.{LIMIT_KEYS.get(self.phase, self.phase)}"
        if self.seconds > self.limit_s:
            limit, basis, ceiling = self.limit_s, self.learned.get(self.phase, Basis()), self.ceiling_s
            what = f"{where} lasts longer than"
        else:
            limit, basis, ceiling = self.wait_limit_s, self.learned.get(WAIT, Basis()), self.ceiling_s
            what = f"{where} waits in a collective ({self.collective}) for longer than"
        if not Limit(limit, ceiling, basis).learned:
            return f"{what} {key} = {limit:g} s"
        return (
            f"{what} {limit:.0f} s, learned from the last {basis.count:,} (99 % took at most "
            f"{basis.p99_s:.1f} s, 99.9 % {basis.p999_s:.1f} s), under {key} = {ceiling:g} s"
        )

    def resumed_after(self, paused_s: Callable[[float], float]) -> "RankState":
        """Returns the state without the seconds of a suspension; `paused_s` gives those since a moment."""
        return replace(
            self,
            began=self.began + paused_s(self.began),
            waiting_since=self.waiting_since + paused_s(self.waiting_since),
        )


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
        self.learner: LimitLearner | None = None
        """Learns smaller limits from the durations of phases; None: those of `limits` hold."""
        state = _unpack(memory)
        self._version, self._phase, self._step, self._began = 0, state.phase, state.step, state.began
        self._limit = Limit(state.limit_s, state.limit_s)
        self._collectives, self._collective, self._waiting = 0, "", False
        self._waiting_since, self._longest_wait_s, self._wait_limit_s = 0.0, 0.0, math.inf
        self._unusual = False
        self._known = _NOTHING_LEARNED

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
        now = time.monotonic()
        if self.learner is not None:
            self._learn(self.learner, now)
        self._phase, self._step, self._began = phase, step, now
        ceiling_s = self.limits.get(phase, math.inf)
        self._limit, self._wait_limit_s = Limit(ceiling_s, ceiling_s), math.inf
        if self.learner is not None:
            learned = self.learner.limit(phase)
            self._limit = Limit(min(learned.seconds, ceiling_s), ceiling_s, learned.basis)
            if phase == "step":
                self._wait_limit_s = self.learner.limit(WAIT).seconds
            self._known = _numbers(self.learner.known(what) for what in LEARNED)
        self._longest_wait_s, self._unusual = 0.0, False
        self._write()

    def _learn(self, learner: LimitLearner, now: float) -> None:
        """Records the phase that ends now, and the longest wait in it."""
        if self._unusual or self._phase not in LEARNED:
            return
        learner.record(self._phase, now - self._began)
        if self._phase == "step":
            learner.record(WAIT, self._longest_wait_s)

    def use_configured_limit(self) -> None:
        """Gives the current phase its configured limit, because it does something unusual that takes long.

        Nothing is learned from its duration.
        """
        self._unusual = True
        self._limit, self._wait_limit_s = Limit(self._limit.ceiling_s, self._limit.ceiling_s), math.inf
        self._write()

    def reach(self, moment: Moment) -> None:
        """Records that this moment of the rank's start is now."""
        struct.pack_into("=d", self._memory, _moment_at(moment), time.monotonic())

    def begin_stage(self, stage: Stage) -> None:
        """Records what the rank does in the phase init from now on, for people who wait."""
        _write_stage(self._memory, stage)

    def begin_collective(self, name: str) -> None:
        """Records that the rank waits in one more collective; every rank counts the same ones."""
        self._collectives, self._collective = self._collectives + 1, name
        self.set_waiting(True)

    def wait_in(self, name: str) -> None:
        """Records that the rank waits in a collective that began before others did; none is counted."""
        self._collective = name
        self.set_waiting(True)

    def set_waiting(self, waiting: bool) -> None:
        """Records whether the rank waits in the last collective."""
        now = time.monotonic()
        if waiting:
            self._waiting_since = now
        elif self._waiting:
            self._longest_wait_s = max(self._longest_wait_s, now - self._waiting_since)
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

    def lease(self) -> tuple[float, float]:
        """Returns the time of the lease's last renewal, and the seconds for which that holds; 0: no lease."""
        renewed_at, lease_s = _LEASE.unpack_from(self._memory, _LEASE_AT)
        return renewed_at, lease_s

    def _write(self) -> None:
        """Writes the block. An odd version number marks it as half written, so that a reader tries again."""
        self._version += 2
        self._memory[0:8] = (self._version - 1).to_bytes(8, "little")
        self._memory[8 : _BLOCK.size] = self._packed()[8:]
        self._memory[0:8] = self._version.to_bytes(8, "little")

    def _packed(self) -> bytes:
        phase, name = self._phase.encode(), self._collective.encode()
        return _BLOCK.pack(
            0,
            phase,
            self._limit.seconds,
            self._step,
            self._began,
            self._collectives,
            name,
            self._waiting,
            self._limit.ceiling_s,
            self._waiting_since,
            self._wait_limit_s,
            self.learner.ranks if self.learner is not None else 0,
            *self._known,
        )


def make(folder: Path) -> mmap.mmap:
    """Makes a new heartbeat file and maps it for the supervisor.

    It says that the rank is in phase init from now on, without a limit.
    """
    path = folder / HEARTBEAT_FILE
    path.write_bytes(bytes(_SIZE))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), _SIZE)
    limits = (math.inf, 0.0, math.inf, 0)
    memory[: _BLOCK.size] = _BLOCK.pack(
        0, b"init", math.inf, 0, time.monotonic(), 0, b"", False, *limits, *_NOTHING_LEARNED
    )
    _write_stage(memory, _FIRST_STAGE)
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


def renew_lease(memory: mmap.mmap, lease_s: float) -> None:
    """Renews the rank's lease, see `lease`; the supervisor calls it again and again."""
    _LEASE.pack_into(memory, _LEASE_AT, time.monotonic(), lease_s)


def request_stop(memory: mmap.mmap) -> None:
    """Sets the flag that the rank reads as a request to stop."""
    memory[_STOP_AT] = 1


def _unpack(memory: mmap.mmap) -> RankState:
    _, phase, limit_s, step, began, collectives, name, waiting, *rest = _BLOCK.unpack(memory[: _BLOCK.size])
    if not began:  # no supervisor made it
        return RankState("init", math.inf, 0, time.monotonic(), 0, "", False)
    ceiling_s, waiting_since, wait_limit_s, ranks, *bases = rest
    learned = {
        what: Basis(*basis)
        for what, basis in zip(LEARNED, zip(bases[::3], bases[1::3], bases[2::3], strict=True), strict=True)
    }
    return RankState(
        _text(phase),
        limit_s,
        step,
        began,
        collectives,
        _text(name),
        waiting,
        ceiling_s,
        waiting_since,
        wait_limit_s,
        learned,
        ranks,
        *_stage(memory),
    )


def _stage(memory: mmap.mmap) -> tuple[str, float]:
    name, began = _STAGE.unpack_from(memory, _STAGE_AT)
    return _text(name), began


def _write_stage(memory: mmap.mmap, stage: Stage) -> None:
    _STAGE.pack_into(memory, _STAGE_AT, stage.encode(), time.monotonic())


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
