"""Ranks agree on what to do at the same step, without waiting for one another.

What a rank sends in one step, all receive in the next.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.comm.protocol import Comm


class StepConsensus:
    """Adds up a few numbers of each rank once a step.

    A request is 1 or 0, so a sum above 0 means that at least one rank made the request.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._pending: Callable[[], Tensor] | None = None

    def exchange(self, numbers: Sequence[float]) -> list[float]:
        """Sends this rank's numbers; returns the sums of the previous step's numbers, the same on every rank.

        Collective, once a step. The first call returns an empty list. The sums travel while the step
        computes, so receiving them costs no waiting.
        """
        sums: list[float] = self._pending().tolist() if self._pending else []
        self._pending = self._comm.start_all_reduce(torch.tensor(numbers, dtype=torch.float32))
        return sums

    def close(self) -> None:
        """Collective: receives the last sums, so that no message is left under way."""
        if self._pending is not None:
            self._pending()
            self._pending = None
