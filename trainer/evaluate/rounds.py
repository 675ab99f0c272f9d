"""Rounds of an evaluation: in each, every rank does one block, or none if too few are left.

Requests to stop are checked between rounds.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from trainer.comm.protocol import Comm
from trainer.errors import InputError, Preempted

Block = TypeVar("Block")


def never() -> bool:
    """Returns False: nobody asks to stop."""
    return False


def rounds(count: int, block: int, comm: Comm, stop: Callable[[], bool]) -> Iterator[int]:
    """Collective: yields where each round begins among `count` items in blocks of `block`.

    Rank 0's block is the first from there. Raises Preempted, on all ranks before the same round or after the
    last, if `stop` is true on any.
    """
    for begin in range(0, count, block * comm.world.size):
        _check(stop, comm)
        yield begin
    _check(stop, comm)


def _check(stop: Callable[[], bool], comm: Comm) -> None:
    if comm.all_reduce(torch.tensor(float(stop()), device=comm.device)) > 0:
        raise Preempted("asked to stop during an evaluation")


def until_unreadable(blocks: Iterable[Block], unreadable: list[str] | None) -> Iterator[Block]:
    """Yields the blocks up to one that cannot be read, whose reason it adds to `unreadable`.

    A `stop` that looks at that list ends the evaluation on all ranks. With None, the InputError is raised.
    """
    try:
        yield from blocks
    except InputError as problem:
        if unreadable is None:
            raise
        unreadable.append(str(problem))
