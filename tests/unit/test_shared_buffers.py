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


def test_a_buffer_is_used_again_when_the_rank_has_let_go_of_its_last_tensor() -> None:
    pool, rank = BufferPool(0, 0), Borrowed()
    got = rank.tensor(lend(pool, 1))
    view = got[1:, :2]
    del got
    second = lend(pool, 2)
    assert second.number == 1
    assert bool((view == 1).all()), "the rank still had a view of the first batch"
    del view
    third = lend(pool, 3)
    assert (third.number, third.memory) == (0, None), "the rank has this memory already"
    assert bool((rank.tensor(third) == 3).all())
    assert bool((rank.tensor(second) == 2).all())


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
