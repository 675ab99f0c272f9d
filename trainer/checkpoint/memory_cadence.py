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
        self.share: float | None = None
        """Mean over the ranks of what keeping each step would cost, as a share of the steps' time."""
        self._costs: list[float] = []
        self._steps: list[float] = []

    def is_due(self, step: int) -> bool:
        """Returns whether this step is kept."""
        return step % self.every == 0

    def record(self, step_s: float, cost_s: float) -> None:
        """Records a step that was kept: its own seconds, and those that keeping it added."""
        if not self.chosen and len(self._steps) < MEASURED:
            self._steps.append(step_s)
            self._costs.append(cost_s)

    @property
    def own_share(self) -> float:
        """Cost as a share of the steps' time on this rank; far below 0 while it is measured.

        The median step counts, since the first ones and single ones take longer for other reasons.
        """
        if len(self._steps) < MEASURED:
            return _UNKNOWN
        return median(self._costs) / max(_LEAST_STEP_S, median(self._steps))

    def receive(self, total: float, ranks: int) -> bool:
        """Takes the sum of all ranks' `own_share`; returns True when it makes the choice, which is once."""
        if self.chosen or total < 0:
            return False
        self.share, self.chosen = total / ranks, True
        self.every = max(1, math.ceil(self.share / SHARE - 1e-9))
        return True
