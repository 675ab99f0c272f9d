"""Rounds of an evaluation, in each of which every rank does one block, or none where too few are left. Between them ranks heed a stop."""

from collections.abc import Callable, Iterator

import torch

from trainer.comm.protocol import Comm
from trainer.errors import Preempted


def never() -> bool:
    """Nobody asks to stop."""
    return False


def rounds(count: int, block: int, comm: Comm, stop: Callable[[], bool]) -> Iterator[int]:
    """Collective: where each round begins among `count` things in blocks of `block`; rank 0's block is the first from there.

    Raises Preempted, on all ranks before the same round, where some rank's `stop` says so.
    """
    for begin in range(0, count, block * comm.world.size):
        if comm.all_reduce(torch.tensor(float(stop()), device=comm.device)) > 0:
            raise Preempted("asked to stop in an evaluation")
        yield begin
