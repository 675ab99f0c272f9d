"""Ranks agree on what to do, at the same step, without waiting for one another: each step tells, the next one hears."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.comm.protocol import Comm


class Agreement:
    """A few numbers of each rank, which all ranks add up: a wish is 1 or 0, and more than 0 means that some rank has it."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._asked: Callable[[], Tensor] | None = None

    def tell(self, numbers: Sequence[float]) -> list[float]:
        """Collective, once a step: sends this rank's numbers off; returns the sums of what was told a step ago, the same on every rank.

        At first nothing was told. The sums travel while the step computes, so hearing them costs no waiting.
        """
        heard: list[float] = self._asked().tolist() if self._asked else []
        self._asked = self._comm.start_all_reduce(torch.tensor(numbers, dtype=torch.float32))
        return heard

    def close(self) -> None:
        """Collective: hear the last answer, so that nothing is under way any more."""
        if self._asked is not None:
            self._asked()
            self._asked = None
