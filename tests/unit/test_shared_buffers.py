"""Buffers of a loader process are used again, and never while the rank still has the batch."""

import pickle

import pytest
import torch
from torch import Tensor

from trainer.data.loader import Batch
from trainer.data.processes import MOST_BUFFERS, Borrowed, BufferPool, Lent

ORDER = (0, 3, 1, 2)
SHAPE = (2, 5, 4, 3)


def filled(pool: BufferPool, value: int) -> Tensor:
    """A batch as the loader fills it: [2, 3, 5, 4], channels last in memory."""
    return pool.empty(SHAPE).permute(ORDER).fill_(value)


def lend(pool: BufferPool, value: int) -> Lent:
    lent = pool.lend(filled(pool, value), ORDER)
    assert lent is not None
    return lent


def test_a_lent_batch_arrives_as_it_was_sent() -> None:
    pool, rank = BufferPool(0, 0), Borrowed()
    sent = filled(pool, 0).copy_(torch.arange(120).view(2, 3, 5, 4))
    lent = pool.lend(sent, ORDER)
    assert lent is not None
    got = rank.tensor(lent)
    assert torch.equal(got, sent)
    assert got.stride() == sent.stride()
    assert got.data_ptr() == sent.data_ptr(), "nothing was copied"


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


def test_a_batch_on_its_way_is_not_overwritten() -> None:
    pool, rank = BufferPool(0, 0), Borrowed()
    lents = [lend(pool, value) for value in range(5)]
    assert [lent.number for lent in lents] == list(range(5))
    assert [int(rank.tensor(lent)[0, 0, 0, 0]) for lent in lents] == list(range(5))


def test_batches_of_several_shapes_use_the_room_of_the_largest() -> None:
    pool, rank = BufferPool(0, 0), Borrowed()
    for number, shape in enumerate([(2, 3, 1, 1), SHAPE, (5, 1, 1, 2)]):
        sent = pool.empty(shape, room=120).fill_(number)
        lent = pool.lend(sent, (0, 1, 2, 3))
        del sent
        assert lent is not None
        assert (lent.number, lent.memory is None) == (0, bool(number))
        assert torch.equal(rank.tensor(lent), torch.full(shape, number, dtype=torch.uint8))


def test_a_batch_that_was_never_sent_gives_its_buffer_back() -> None:
    pool = BufferPool(0, 0)
    begun = filled(pool, 1)
    assert lend(pool, 2).number == 1, "the first is still being filled"
    del begun
    assert lend(pool, 3).number == 0


def test_batches_of_another_size_get_buffers_of_their_own() -> None:
    pool, rank = BufferPool(0, 0), Borrowed()
    del (small := {0: rank.tensor(lend(pool, 1))})[0]
    assert not small
    larger = pool.empty((3, 5, 4, 3)).permute(ORDER).fill_(7)
    lent = pool.lend(larger, ORDER)
    assert lent is not None
    assert lent.number == 1
    assert rank.tensor(lent).shape == (3, 3, 5, 4)


def test_beyond_the_largest_number_of_buffers_a_batch_has_memory_of_its_own() -> None:
    pool = BufferPool(0, 0)
    lents = [lend(pool, 0) for _ in range(MOST_BUFFERS)]
    more = filled(pool, 9)
    assert len(lents) == MOST_BUFFERS
    assert pool.lend(more, ORDER) is None
    assert more.is_shared()
    assert bool((more == 9).all())


def test_buffers_of_different_loaders_are_told_apart_and_outlive_their_loader() -> None:
    rank = Borrowed()
    one, other = (rank.tensor(lend(BufferPool(loader, 0), loader)) for loader in (1, 2))
    rank.forget(1)
    assert (int(one.min()), int(other.min())) == (1, 2)
    with pytest.raises(KeyError):
        rank.tensor(Lent(1, 0, 0, None, SHAPE, ORDER))


def test_a_batch_that_lies_in_no_buffer_is_sent_whole() -> None:
    assert BufferPool(0, 0).lend(torch.zeros(SHAPE, dtype=torch.uint8).permute(ORDER), ORDER) is None
    images = torch.arange(6, dtype=torch.uint8).view(1, 3, 1, 2)
    batch = Batch(images, torch.tensor([[1, 2]]), 3, 4, 5, torch.tensor([6]), ["caption"], ["key"])
    copy = pickle.loads(pickle.dumps(batch))
    assert all(torch.equal(getattr(copy, name), getattr(batch, name)) for name in ("images", "tokens"))
    assert torch.equal(copy.positions, batch.positions)
    assert (copy.epoch, copy.batch_in_epoch, copy.micro_batch) == (3, 4, 5)
    assert (copy.captions, copy.keys, copy.bad) == (["caption"], ["key"], ())
