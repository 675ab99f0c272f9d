"""Rounds of an evaluation: in each, every rank does one block, or none if too few are left.

Requests to stop are checked between rounds.
"""

from collections.abc import Callable, Iterator

import torch

from trainer.comm.protocol import Comm
from trainer.errors import Preempted


def never() -> bool:
    """Returns False: nobody asks to stop."""
    return False


def rounds(count: int, block: int, comm: Comm, stop: Callable[[], bool]) -> Iterator[int]:
    """Collective: yields where each round begins among `count` items in blocks of `block`.

    Rank 0's block is the first from there. Raises Preempted, on all ranks before the same round, if `stop` is
    true on any.
    """
    for begin in range(0, count, block * comm.world.size):
        if comm.all_reduce(torch.tensor(float(stop()), device=comm.device)) > 0:
            raise Preempted("asked to stop during an evaluation")
        yield begin
