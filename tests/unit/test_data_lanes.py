"""The order of lanes: each sample once, the same on any ranks, whole blocks for a rank, nothing favoured."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.lanes import LaneOrder, Lanes, Pieces

SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=8)


@st.composite
def orders(draw: st.DrawFn) -> tuple[LaneOrder, list[int]]:
    sizes = draw(SIZES)
    lanes = draw(st.sampled_from([1, 2, 4, 8]))
    of_a_lane = draw(st.sampled_from([1, 3]))
    order = LaneOrder(
        sizes,
        Lanes(draw(st.integers(1, 80)), lanes),
        seed=draw(st.integers(0, 2**31)),
        epoch=draw(st.integers(0, 99)),
        batch=lanes * of_a_lane,
    )
    return order, sizes


@settings(deadline=None)
@given(orders())
def test_an_epoch_has_each_sample_once_but_for_less_than_a_batch(made: tuple[LaneOrder, list[int]]) -> None:
    order, sizes = made
    samples = order.samples(0, len(order)).tolist()
    assert len(set(samples)) == len(samples) == len(order)
    assert set(samples) <= set(range(sum(sizes)))
    assert 0 <= sum(sizes) - len(order) < order.batch


@settings(deadline=None)
@given(orders(), st.data())
def test_any_part_of_the_order_is_that_part_of_the_whole(
    made: tuple[LaneOrder, list[int]], data: st.DataObject
) -> None:
    order, _ = made
    begin = data.draw(st.integers(0, len(order)))
    end = data.draw(st.integers(begin, len(order)))
    assert order.samples(begin, end).tolist() == order.samples(0, len(order)).tolist()[begin:end]


@settings(deadline=None)
@given(orders())
def test_a_piece_is_in_one_shard_and_ends_with_its_last_batch(made: tuple[LaneOrder, list[int]]) -> None:
    order, sizes = made
    pieces, ends = order.pieces(0, len(order)), np.cumsum(sizes)
    batches = np.arange(len(order)) // order.batch
    assert (batches <= pieces.last_batches).all()
    assert (pieces.firsts <= pieces.samples).all()
    assert (pieces.samples < pieces.firsts + pieces.counts).all()
    last = pieces.firsts + pieces.counts - 1
    assert (np.searchsorted(ends, pieces.firsts, "right") == np.searchsorted(ends, last, "right")).all()


def whole_pieces(pieces: Pieces, begin: int, end: int) -> set[int]:
    return set(pieces.numbers[begin:end].tolist())


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("lanes", [8, 16])
def test_no_two_ranks_read_one_piece_and_each_is_read_once(ranks: int, lanes: int) -> None:
    order = LaneOrder([400] * 20, Lanes(50, lanes), seed=1, epoch=2, batch=16)
    pieces = order.pieces(0, len(order))
    slots = np.arange(len(order)) % 16 // (16 // ranks)
    owned = [set(pieces.numbers[slots == rank].tolist()) for rank in range(ranks)]
    assert sum(map(len, owned)) == len(set(pieces.numbers.tolist()))
    # A block of 50 is one piece, but for two cuts of each lane.
    assert len(set(pieces.numbers.tolist())) <= 8000 / 50 + 2 * lanes
    for number in set(pieces.numbers.tolist()):
        at = np.flatnonzero(pieces.numbers == number) // 16
        assert at.max() - at.min() < 50, "its samples come one batch after the other"


def test_a_batch_has_samples_of_as_many_blocks_as_there_are_lanes() -> None:
    order = LaneOrder([1000] * 1000, Lanes(100, 64), seed=3, epoch=1, batch=64)
    blocks = [set((order.samples(k * 64, k * 64 + 64) // 100).tolist()) for k in (0, 700, 14_000)]
    assert [len(found) for found in blocks] == [64, 64, 64]


def test_not_all_blocks_begin_in_the_same_batches() -> None:
    order = LaneOrder([1000] * 1280, Lanes(100, 64), seed=3, epoch=1, batch=64)  # lanes of 200 blocks
    pieces = order.pieces(64 * 1000, 64 * 1100)
    begun = np.unique(pieces.numbers, return_index=True)[1] // 64
    assert np.bincount(begun[begun > 0], minlength=100).max() < 8


def test_no_slot_block_or_shard_is_favoured_over_50_epochs() -> None:
    """For each sample and each shard: its mean batch and slot; how often the remainder leaves it out."""
    sizes, batch = [40] * 25 + [7] * 9, 32
    total, epochs = sum(sizes), 50
    shard = np.repeat(np.arange(len(sizes)), sizes)
    batches, slots, seen = np.zeros(total), np.zeros(total), np.zeros(total)
    together = 0
    for epoch in range(epochs):
        order = LaneOrder(sizes, Lanes(8, batch), seed=5, epoch=epoch, batch=batch)
        samples = order.samples(0, len(order))
        seen[samples] += 1
        batches[samples] += np.arange(len(samples)) // batch
        slots[samples] += np.arange(len(samples)) % batch
        together += sum(
            len(part) - len(np.unique(part // 8)) for part in np.split(samples, len(samples) // batch)
        )
    steps = total // batch
    assert seen.sum() == epochs * steps * batch
    assert seen.min() >= epochs - 8
    # A mean of 50 uniform numbers of [0, n) has a deviation of n / sqrt(12 * 50) = 0.041 n; 1063 of them.
    assert np.abs(batches / seen - (steps - 1) / 2).max() < 4.8 * 0.041 * steps
    assert np.abs(slots / seen - (batch - 1) / 2).max() < 4.8 * 0.041 * batch
    for means, size in ((batches / seen, steps), (slots / seen, batch)):
        of_shards = np.bincount(shard, means) / sizes
        assert of_shards.std() < 0.041 * size, "shards are not more uneven than single samples"
    assert together / (epochs * steps * batch) < 0.05, "neighbours rarely meet in a batch"


def test_samples_change_places_from_epoch_to_epoch_and_seed_to_seed() -> None:
    first, *others = (
        LaneOrder([50] * 20, Lanes(10, 8), seed=seed, epoch=epoch, batch=8).samples(0, 1000)
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    )
    assert all(np.mean(first == other) < 0.02 for other in others)


def test_lanes_shorter_than_a_block_shuffle_the_whole_block() -> None:
    # With 2,000 epochs, each of 6 samples comes first 333 times, give or take 17 (one standard deviation).
    first = [
        int(LaneOrder([6], Lanes(100, 2), seed=3, epoch=epoch, batch=2).samples(0, 1)[0])
        for epoch in range(2000)
    ]
    assert np.bincount(first, minlength=6) == pytest.approx(np.full(6, 333), abs=90)


def test_the_order_is_frozen_across_versions() -> None:
    """A run resumed with another release must find the same samples: these numbers may never change."""
    long = LaneOrder([5, 2, 6], Lanes(3, 2), seed=7, epoch=2, batch=4)
    assert long.samples(0, 99).tolist() == [6, 5, 10, 11, 4, 3, 8, 9, 2, 7, 1, 0]
    short = LaneOrder([5, 2, 6], Lanes(50, 4), seed=7, epoch=2, batch=4)
    assert short.samples(0, 99).tolist() == [8, 9, 6, 1, 7, 11, 2, 4, 12, 10, 5, 3]
    weighted = LaneOrder([9, 2, 16], Lanes(4, 2), weights=[1, 0.5, 2], seed=7, epoch=2, batch=2)
    assert weighted.samples(0, 16).tolist() == [8, 14, 7, 24, 18, 23, 16, 5, 15, 4, 17, 3, 21, 9, 22, 23]


def test_a_long_epoch_costs_as_much_memory_as_it_has_blocks() -> None:
    order = LaneOrder([10_000] * 10_000, Lanes(1000, 4096), seed=1, epoch=3, batch=4096)
    assert len(np.unique(order.samples(90_112_000, 90_116_096))) == 4096
    assert order.nbytes <= 100_000 * 17 + 4096 * 8 + 4096 * 4000
