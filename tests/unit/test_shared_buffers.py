"""Buffers of a loader process are used again, and never while the rank still has the batch."""

from typing import Any

import pytest
from torch import Tensor

from trainer.data.processes import Borrowed, BufferPool

ORDER = (0, 3, 1, 2)
SHAPE = (2, 5, 4, 3)


def filled(pool: BufferPool, value: int) -> Tensor:
    """A batch as the loader fills it: [2, 3, 5, 4], channels last in memory."""
    return pool.empty(SHAPE).permute(ORDER).fill_(value)


def lend(pool: BufferPool, value: int) -> Any:
    lent = pool.lend(filled(pool, value), ORDER)
    assert lent is not None
    return lent


def test_beyond_the_largest_number_of_buffers_a_batch_has_memory_of_its_own() -> None:
    pool = BufferPool(0, 0)
    lents = [lend(pool, 0) for _ in range(32)]
    more = filled(pool, 9)
    assert len(lents) == 32
    assert pool.lend(more, ORDER) is None
    assert more.is_shared()
    assert bool((more == 9).all())


def test_buffers_of_different_loaders_are_told_apart_and_outlive_their_loader() -> None:
    rank = Borrowed()
    sent = [lend(BufferPool(loader, 0), loader) for loader in (1, 2)]
    one, other = map(rank.tensor, sent)
    rank.forget(1)
    assert (int(one.min()), int(other.min())) == (1, 2)
    with pytest.raises(KeyError):
        rank.tensor(sent[0]._replace(memory=None))
