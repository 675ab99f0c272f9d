"""Learns from a rank's own durations how long its next step may last, far below the configured limit.

A rank learns from its own durations alone. A step ends for all ranks together, so each rank's durations
already hold the wait for the slowest one, and nothing has to be sent. Which rank was late is no matter of
limits: the coordinator asks all of them (`trainer.supervise.coordinate.diagnosis`).

All decisions are pure: no clock, no process, no file. No torch.
"""

import json
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass

FLOOR_S = 12.0
"""Smallest learned limit. A late rank is then named within 15 s, with the time that the diagnosis takes."""
P99_FACTOR = 6.0
"""Learned limit, as a multiple of what 99 % of the durations reach: steps as they usually are, which may
become slower by as much, as on a GPU that grows too hot."""
P999_FACTOR = 2.0
"""Learned limit, as a multiple of what 99.9 % of them reach: rare pauses, such as those of storage."""
WINDOW = 1000
"""Durations that are kept."""
ENOUGH = 100
"""Durations from which a limit is learned as it is; from fewer, one that is longer in proportion."""
FEWEST = 10
"""Durations without which no limit is learned."""
SETTLED = 5
"""Durations after which a new generation believes what the one before it learned."""
STEPS_OF_WAIT = 3.0
"""Smallest limit of a wait, as a multiple of what 99 % of the steps reach: another rank may slow down to a
third, and this one waits for it."""

WAIT = "collective"
"""Name of the longest wait within a step; the others are phases."""
LEARNED = ("step", "data", WAIT)
LEARNED_LIMITS = "CLIPSHIP_LEARNED_LIMITS"
"""Variable by which a supervisor tells the next generation of its rank what the last one has learned."""


@dataclass(frozen=True)
class Basis:
    """Durations that a limit is learned from: their number and two percentiles; 0 of them: no limit."""

    count: int = 0
    p99_s: float = 0.0
    p999_s: float = 0.0


@dataclass(frozen=True)
class Limit:
    """Limit in force, the configured one above it, and the basis; without a basis both limits are equal."""

    seconds: float = math.inf
    ceiling_s: float = math.inf
    basis: Basis = Basis()

    @property
    def learned(self) -> bool:
        return self.basis.count > 0 and self.seconds < self.ceiling_s


class Durations:
    """The last durations of one kind, in seconds, kept in their order of time and in that of their length.

    Adding one costs microseconds, however many are kept.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._in_time: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float) -> None:
        self._in_time.append(seconds)
        insort(self._sorted, seconds)
        if len(self._in_time) > self._window:
            del self._sorted[bisect_left(self._sorted, self._in_time.popleft())]

    def basis(self) -> Basis:
        """Returns number and percentiles; until the window is full, the longest counts as the 99.9th."""
        count = len(self._sorted)
        if not count:
            return Basis()
        longest = -2 if count == self._window else -1
        return Basis(count, self._sorted[math.ceil(0.99 * count) - 1], self._sorted[longest])


class LimitLearner:
    """Learns the limits of a rank's steps, of its waits for data and of its waits within a step."""

    def __init__(
        self, ceilings: Mapping[str, float], period: int = 1, ranks: int = 1, before: str = ""
    ) -> None:
        """`ceilings` holds the configured limits in seconds by phase; `before` is the last generation's text.

        `period` is the largest number of steps from one that does extra work, such as writing a record, to
        the next: a limit is learned only after several of these.
        """
        self._ceilings, self.ranks, self._before = ceilings, ranks, from_text(before, ranks)
        self._fewest = max(FEWEST, 3 * period)
        self._durations = {what: Durations(max(WINDOW, 3 * period)) for what in LEARNED}

    def record(self, what: str, seconds: float) -> None:
        """Records the length of a phase, or of the longest wait in a step; other phases are not learned."""
        if what in self._durations:
            self._durations[what].add(seconds)

    def known(self, what: str) -> Basis:
        """Returns what was seen of a phase or of the waits, for the next generation to go on with.

        What the last one saw counts until this one has seen enough itself.
        """
        own = self._durations[what].basis() if what in self._durations else Basis()
        before = self._before.get(what, Basis())
        if own.count >= ENOUGH or not before.count:
            return own
        p99_s, p999_s = max(before.p99_s, own.p99_s), max(before.p999_s, own.p999_s)
        return Basis(before.count + own.count, p99_s, p999_s)

    def basis(self, what: str) -> Basis:
        """Returns what a limit can be learned from; a count of 0 as long as it is not enough."""
        known = self.known(what)
        settled = what in self._durations and len(self._durations[what]) >= SETTLED
        return known if settled and known.count >= self._fewest else Basis()

    def limit(self, what: str) -> Limit:
        """Returns the limit of a phase or of a wait within a step; never above the configured one."""
        ceiling_s = self._ceilings.get("step" if what == WAIT else what, math.inf)
        basis = self.basis(what)
        if not basis.count:
            return Limit(ceiling_s, ceiling_s)
        learned_s = max(FLOOR_S, P99_FACTOR * basis.p99_s, P999_FACTOR * basis.p999_s)
        if what == WAIT:
            learned_s = max(learned_s, STEPS_OF_WAIT * self.basis("step").p99_s)
        learned_s *= max(1.0, ENOUGH / basis.count)
        return Limit(min(learned_s, ceiling_s), ceiling_s, basis)


def to_text(bases: Mapping[str, Basis], ranks: int) -> str:
    """Returns what a generation of so many ranks has learned, as LEARNED_LIMITS has it."""
    return json.dumps({"ranks": ranks, **{what: asdict(basis) for what, basis in bases.items()}})


def from_text(text: str, ranks: int) -> dict[str, Basis]:
    """Returns what `to_text` wrote; nothing if the number of ranks has changed.

    Steps then take another time.
    """
    known = json.loads(text or "{}")
    if known.pop("ranks", 0) != ranks:
        return {}
    return {what: Basis(**basis) for what, basis in known.items()}
