"""The cost of keeping a step in memory decides how often one is kept."""

import pytest

from trainer.checkpoint.memory_keeper import Cadence

SHARE = 0.02
"""Largest share of a step's time that keeping it may take."""


def measured(step_s: float, cost_s: float) -> Cadence:
    cadence = Cadence()
    while cadence.own_need < 0:  # not measured yet
        cadence.record(step_s, cost_s)
    return cadence


@pytest.mark.parametrize(
    ("times", "every", "share"),
    [
        ((1.0, SHARE / 2), 1, SHARE / 2),
        ((1.0, 2.5 * SHARE), 3, 2.5 * SHARE),
        ((0.1, 0.0, 0.24), 4, 0.0),  # a copy that lasts several steps begins when the one before is complete
        ((1.0, 0.0, SHARE), 1, None),  # one that lasts a little longer than a step is waited for
    ],
)
def test_every_kth_step_is_kept_so_that_the_cost_stays_below_the_limit(
    times: tuple[float, ...], every: int, share: float | None
) -> None:
    """Each one while it is measured; one slow step and one slow copy change nothing."""
    cadence = Cadence()
    cadence.record(100.0, SHARE / 2)
    cadence.record(1.0, 50.0)
    assert (cadence.every, cadence.chosen) == (1, False)
    while cadence.own_need < 0:
        cadence.record(*times)
    assert cadence.receive(2 * cadence.own_need, ranks=2)
    assert (cadence.every, cadence.chosen) == (every, True)
    assert share in (None, cadence.share)
    assert [step for step in range(1, 13) if cadence.is_due(step)] == list(range(every, 13, every))


def test_ranks_choose_the_same_from_the_sum_and_only_once() -> None:
    cheap, dear = measured(1.0, 0.0), measured(1.0, 4 * SHARE)
    total = cheap.own_need + dear.own_need
    for cadence in (cheap, dear):
        assert cadence.receive(total, 2)
        assert cadence.every == 3
        assert not cadence.receive(9 * total, 2)
    assert not Cadence(4).receive(9 * total, 2), "the ranks before have chosen"


def test_nothing_is_chosen_until_every_rank_has_measured() -> None:
    cadence = measured(1.0, 9 * SHARE)
    assert not cadence.receive(cadence.own_need + Cadence().own_need, 2)
    assert cadence.every == 1
