"""The order of lanes: each sample once, the same on any ranks, whole blocks for a rank, nothing favoured.

Seeds of random choices depend on their position alone, and weights say how often a sample comes.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.lanes import LaneOrder, Lanes
from trainer.data.order import position_seed

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


def test_position_seeds_are_frozen_across_versions() -> None:
    """A run resumed with another numpy must draw the same captions: these numbers may never change."""
    assert position_seed(7, 2, 5, "caption") == 7805577719114010955


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])),
        min_size=1,
        max_size=6,
    )
)
def test_weights_say_how_often_an_epoch_has_a_sample(shards: list[tuple[int, float]]) -> None:
    sizes, weights = [size for size, _ in shards], [weight for _, weight in shards]
    firsts = np.cumsum([0, *sizes])
    counts = np.zeros(sum(sizes), dtype=int)
    for epoch in range(4):
        order = LaneOrder(sizes, Lanes(4, 1), weights=weights, seed=1, epoch=epoch, batch=1)
        assert len(order) == pytest.approx(np.dot(sizes, weights), abs=1)
        counts += np.bincount(order.samples(0, len(order)), minlength=sum(sizes))
    for first, size, weight in zip(firsts.tolist(), sizes, weights, strict=False):
        of_shard = counts[first : first + size]
        if weight == int(weight):
            assert (of_shard == 4 * weight).all()
        elif size:
            assert of_shard.max() - of_shard.min() <= 1  # epochs go through a shard in turn
