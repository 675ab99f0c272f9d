"""Ranks agree on what to do, at the same step, without waiting for one another: each step asks, the next one hears."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.comm.protocol import Comm


class Agreement:
    """A few yes-or-no questions that any rank may answer with yes."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._asked: Callable[[], Tensor] | None = None

    def ask(self, wishes: Sequence[bool]) -> list[bool]:
        """Collective, once a step: sends this rank's wishes off; returns what some rank wished for a step ago, the same on every rank.

        The sum travels while the step computes, so hearing it costs no waiting.
        """
        heard = [count > 0 for count in self._asked().tolist()] if self._asked else [False] * len(wishes)
        self._asked = self._comm.start_all_reduce(torch.tensor([float(wish) for wish in wishes]))
        return heard

    def close(self) -> None:
        """Collective: hear the last answer, so that nothing is under way any more."""
        if self._asked is not None:
            self._asked()
            self._asked = None
