"""Rounds of an evaluation: in each, every rank does one block, or none if too few are left.

Requests to stop are checked between rounds.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainer.comm.protocol import Comm
from trainer.errors import InputError, Preempted

Block = TypeVar("Block")


def never() -> bool:
    """Returns False: nobody asks to stop."""
    return False


@dataclass(frozen=True)
class Rounds:
    """The ranks of an evaluation, and what ends it early on all of them."""

    comm: Comm
    stop: Callable[[], bool] = never
    """Function that returns whether this rank is asked to stop; it is called before each round."""
    unreadable: list[str] | None = None
    """Reasons why this rank cannot read its blocks, which end the evaluation like a request to stop. With
    None, the InputError is raised."""

    def of(self, count: int, block: int) -> Iterator[int]:
        """Collective: yields where each round begins among `count` items in blocks of `block`.

        Rank 0's block is the first from there. Raises Preempted, on all ranks before the same round or after
        the last, if any is asked to stop.
        """
        for begin in range(0, count, block * self.comm.world.size):
            self._check()
            yield begin
        self._check()

    def _check(self) -> None:
        ends = float(bool(self.unreadable) or self.stop())
        if self.comm.all_reduce(torch.tensor(ends, device=self.comm.device)) > 0:
            raise Preempted("asked to stop during an evaluation")

    def until_unreadable(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yields the blocks up to one that cannot be read, whose reason it adds to `unreadable`."""
        try:
            yield from blocks
        except InputError as problem:
            if self.unreadable is None:
                raise
            self.unreadable.append(str(problem))
