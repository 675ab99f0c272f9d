"""The order of an epoch depends on shards, seed, epoch and window alone."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.lanes import Lanes
from trainer.data.order import Order, Samples, epoch_samples, position_seed
from trainer.data.window_order import Window, WindowOrder


def epoch_order(sizes: list[int], *, seed: int, epoch: int, window: int) -> Samples:
    """The whole epoch at once."""
    return WindowOrder(sizes, seed=seed, epoch=epoch, window=window).samples(0, sum(sizes))


SIZES = st.lists(st.integers(0, 40), max_size=12)


@given(SIZES, st.integers(0, 2**31 - 1), st.integers(0, 1000), st.integers(1, 200))
def test_an_epoch_visits_every_sample_once(sizes: list[int], seed: int, epoch: int, window: int) -> None:
    order = epoch_order(sizes, seed=seed, epoch=epoch, window=window)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(sum(sizes)))


@given(SIZES, st.integers(0, 2**31 - 1), st.integers(0, 1000), st.integers(1, 200))
def test_the_order_repeats_whatever_was_drawn_before(
    sizes: list[int], seed: int, epoch: int, window: int
) -> None:
    first = epoch_order(sizes, seed=seed, epoch=epoch, window=window)
    np.random.seed(seed % 7)
    np.random.random(3)
    assert np.array_equal(
        epoch_order(np.array(sizes, dtype=int).tolist(), seed=seed, epoch=epoch, window=window), first
    )


@given(SIZES, st.integers(0, 100), st.integers(0, 100), st.integers(1, 60))
def test_shuffling_carries_no_sample_past_the_window(
    sizes: list[int], seed: int, epoch: int, window: int
) -> None:
    unshuffled = epoch_order(sizes, seed=seed, epoch=epoch, window=1)
    place = {sample: number for number, sample in enumerate(unshuffled.tolist())}
    order = epoch_order(sizes, seed=seed, epoch=epoch, window=window)
    assert all(abs(place[sample] - number) < window for number, sample in enumerate(order.tolist()))


@given(SIZES, st.integers(0, 100), st.integers(0, 100))
def test_a_window_of_one_keeps_each_shard_in_its_own_order(sizes: list[int], seed: int, epoch: int) -> None:
    order = epoch_order(sizes, seed=seed, epoch=epoch, window=1).tolist()
    steps = [b - a for a, b in pairwise(order)]
    assert sum(step != 1 for step in steps) <= max(0, sum(size > 0 for size in sizes) - 1)


def test_shards_and_samples_change_places_from_epoch_to_epoch_and_seed_to_seed() -> None:
    sizes = [50] * 20
    orders = [
        epoch_order(sizes, seed=seed, epoch=epoch, window=100) for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.mean(orders[one] == orders[other]) < 0.05
    assert len({int(order[:25].mean()) // 50 for order in orders}) > 1


def test_a_window_of_the_whole_epoch_shuffles_evenly() -> None:
    # With 2,000 epochs, each of 6 samples comes first 333 times, give or take 17 (one standard deviation).
    first = [int(epoch_order([2, 4], seed=3, epoch=epoch, window=6)[0]) for epoch in range(2000)]
    assert np.bincount(first, minlength=6) == pytest.approx(np.full(6, 333), abs=90)


def test_the_order_is_frozen_across_versions() -> None:
    """A run resumed with another numpy must find the same samples: these numbers may never change."""
    assert epoch_order([3, 2, 4], seed=7, epoch=2, window=4).tolist() == [6, 7, 5, 0, 1, 2, 8, 4, 3]
    assert position_seed(7, 2, 5, "caption") == 7805577719114010955


@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 10**6),
    st.integers(0, 2**40),
    st.sampled_from(["caption", "augmentation"]),
)
def test_a_position_seed_fits_every_generator(seed: int, epoch: int, position: int, purpose: str) -> None:
    drawn = position_seed(seed, epoch, position, purpose)
    assert 0 <= drawn < 2**63
    assert drawn == position_seed(seed, epoch, position, purpose)


def test_position_seeds_differ_by_each_argument() -> None:
    near = {
        position_seed(s, e, p, name)
        for s in range(5)
        for e in range(5)
        for p in range(50)
        for name in ("a", "b")
    }
    assert len(near) == 5 * 5 * 50 * 2
    # 1/1/11 and 11/1/1 are not the same text.
    assert position_seed(1, 1, 11, "a") != position_seed(11, 1, 1, "a")


def test_ordering_needs_no_torch() -> None:
    program = (
        "import sys, trainer.data.order, trainer.data.source, trainer.data.pack; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 50), st.integers(1, 100), st.data()
)
def test_any_part_of_the_order_is_that_part_of_the_whole(
    sizes: list[int], epoch: int, window: int, data: st.DataObject
) -> None:
    order = WindowOrder(sizes, seed=1, epoch=epoch, window=window)
    begin = data.draw(st.integers(0, len(order)))
    end = data.draw(st.integers(begin, len(order)))
    fresh = WindowOrder(sizes, seed=1, epoch=epoch, window=window)
    assert fresh.samples(begin, end).tolist() == order.samples(0, len(order)).tolist()[begin:end]


@pytest.mark.parametrize("kind", [Window(20), Lanes(4, 1)], ids=["window", "lanes"])
@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])),
        min_size=1,
        max_size=6,
    )
)
def test_weights_say_how_often_an_epoch_has_a_sample(kind: Order, shards: list[tuple[int, float]]) -> None:
    sizes, weights = [size for size, _ in shards], [weight for _, weight in shards]
    firsts = np.cumsum([0, *sizes])
    counts = np.zeros(sum(sizes), dtype=int)
    for epoch in range(4):
        order = kind.of_epoch(sizes, weights, seed=1, epoch=epoch, batch=1)
        assert len(order) == epoch_samples(sizes, weights) == pytest.approx(np.dot(sizes, weights), abs=1)
        counts += np.bincount(order.samples(0, len(order)), minlength=sum(sizes))
    for first, size, weight in zip(firsts.tolist(), sizes, weights, strict=False):
        of_shard = counts[first : first + size]
        if weight == int(weight):
            assert (of_shard == 4 * weight).all()
        elif size:
            assert of_shard.max() - of_shard.min() <= 1  # epochs go through a shard in turn


def test_the_end_of_a_long_epoch_costs_what_its_beginning_costs() -> None:
    order = WindowOrder([10_000] * 10_000, seed=1, epoch=3, window=10_000)
    before = order.samples(90_000_000, 90_004_096)
    assert len(np.unique(before)) == 4096
    assert sum(window.nbytes for window in order._kept.values()) <= 2 * 80_000
