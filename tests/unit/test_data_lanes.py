"""The order of lanes: each sample once, the same on any ranks, whole blocks for a rank, nothing favoured.

Seeds of random choices depend on their position alone, and weights say how often a sample comes.
"""

import numpy as np

from trainer.data.lanes import LaneOrder, Lanes


def test_a_long_epoch_costs_as_much_memory_as_it_has_blocks() -> None:
    order = LaneOrder([10_000] * 10_000, Lanes(1000, 4096), seed=1, epoch=3, batch=4096)
    assert len(np.unique(order.samples(90_112_000, 90_116_096))) == 4096
    assert order.nbytes <= 100_000 * 17 + 4096 * 8 + 4096 * 4000
