"""Chooses how often a step is kept in memory: every step, or every k-th, so that it costs little.

Pure: no clock, no process, no file. All ranks choose the same k at the same step, since the ranks of a node
must keep the same steps.
"""

import math
from statistics import median

SHARE = 0.02
"""Largest share of the steps' time that keeping them may cost."""
MEASURED = 10
"""Steps that are measured before the choice; each of them is kept."""
_LEAST_STEP_S = 1e-6
_UNKNOWN = -1e6


class Cadence:
    """Measures the cost of keeping a step and chooses every how many steps one is kept."""

    def __init__(self, every: int | None = None) -> None:
        """`every` is the choice of an earlier generation of ranks; None measures."""
        self.every = every or 1
        """A step is kept if it is a multiple of this number."""
        self.chosen = every is not None
        """True once `every` is chosen for good."""
        self._steps: list[float] = []
        self._costs: list[float] = []
        self._beside: list[float] = []

    def is_due(self, step: int) -> bool:
        """Returns whether this step is kept."""
        return step % self.every == 0

    def record(self, step_s: float, cost_s: float, waited_s: float = 0.0) -> None:
        """Records a step that was kept.

        These are its own seconds, those that keeping it added to any step, and those for which it first
        waited until the one before was complete: these are gone where steps are kept less often.
        """
        if not self.chosen and len(self._steps) < MEASURED:
            self._steps.append(step_s)
            self._costs.append(cost_s)
            self._beside.append(waited_s)

    @property
    def share(self) -> float | None:
        """Cost of keeping a step on this rank, as a share of a step's time; None until it is measured.

        The median step counts, since the first ones and single ones take longer for other reasons.
        """
        return self._in_steps(self._costs) if len(self._steps) == MEASURED else None

    @property
    def beside(self) -> float:
        """Steps that go by until a step that is kept is complete, once it is measured."""
        return 1 + self._in_steps(self._beside)

    @property
    def own_need(self) -> float:
        """Least `every` with which keeping costs no more than SHARE; far below 0 while it is measured.

        A step that is kept every n steps costs c, and waits for the one before where that takes longer than
        n steps: c + max(0, beside - n) <= SHARE * n.
        """
        if (share := self.share) is None:
            return _UNKNOWN
        return max(share / SHARE, (share + self.beside) / (1 + SHARE))

    def receive(self, total: float, ranks: int) -> bool:
        """Takes the sum of all ranks' `own_need`; returns True when it makes the choice, which is once."""
        if self.chosen or total < 0:
            return False
        self.chosen = True
        self.every = max(1, math.ceil(total / ranks - 1e-9))
        return True

    def _in_steps(self, seconds: list[float]) -> float:
        return median(seconds) / max(_LEAST_STEP_S, median(self._steps))
