"""Buffers of a loader process are used again, and never while the rank still has the batch."""

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.data.loader import Batch
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


def test_batches_of_several_shapes_use_the_room_of_the_largest() -> None:
    pool, rank = BufferPool(0, 0), Borrowed()
    for number, shape in enumerate([(2, 3, 1, 1), SHAPE, (5, 1, 1, 2)]):
        sent = pool.empty(shape, room=120).fill_(number)
        lent = pool.lend(sent, (0, 1, 2, 3))
        del sent
        assert lent is not None
        assert (lent.number, lent.memory is None) == (0, bool(number))
        assert torch.equal(rank.tensor(lent), torch.full(shape, number, dtype=torch.uint8))


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


def test_a_batch_that_lies_in_no_buffer_is_sent_whole() -> None:
    assert BufferPool(0, 0).lend(torch.zeros(SHAPE, dtype=torch.uint8).permute(ORDER), ORDER) is None
    images = torch.arange(6, dtype=torch.uint8).view(1, 3, 1, 2)
    plain = Batch(images, torch.tensor([[1, 2]]), 3, 4, 5, torch.tensor([6]), ["caption"], ["key"])
    copy = pickle.loads(pickle.dumps(plain))
    assert (copy.targets, copy.groups, copy.alone) == (None, None, ())
    groups = torch.tensor([-(2**63)])
    more: dict[str, Any] = {"targets": torch.rand(1, 2, 4, dtype=torch.float16), "groups": groups}
    batch = dataclasses.replace(plain, alone=("key",), **more)
    copy = pickle.loads(pickle.dumps(batch))
    assert all(torch.equal(getattr(copy, name), getattr(batch, name)) for name in ("images", "tokens", *more))
    assert copy.alone == ("key",)
    assert torch.equal(copy.positions, batch.positions)
    assert (copy.epoch, copy.batch_in_epoch, copy.micro_batch) == (3, 4, 5)
    assert (copy.captions, copy.keys, copy.bad) == (["caption"], ["key"], ())
