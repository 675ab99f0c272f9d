"""Seeds of random choices depend on their position alone, and weights say how often a sample comes."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.lanes import LaneOrder, Lanes
from trainer.data.order import epoch_samples, position_seed


def test_position_seeds_are_frozen_across_versions() -> None:
    """A run resumed with another numpy must draw the same captions: these numbers may never change."""
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
        assert len(order) == epoch_samples(sizes, weights) == pytest.approx(np.dot(sizes, weights), abs=1)
        counts += np.bincount(order.samples(0, len(order)), minlength=sum(sizes))
    for first, size, weight in zip(firsts.tolist(), sizes, weights, strict=False):
        of_shard = counts[first : first + size]
        if weight == int(weight):
            assert (of_shard == 4 * weight).all()
        elif size:
            assert of_shard.max() - of_shard.min() <= 1  # epochs go through a shard in turn
