"""The cost of keeping a step in memory decides how often one is kept."""

from trainer.checkpoint.memory_keeper import Cadence

SHARE = 0.02
"""Largest share of a step's time that keeping it may take."""


def measured(step_s: float, cost_s: float, waited_s: float = 0.0) -> Cadence:
    cadence = Cadence()
    while cadence.own_need < 0:  # not measured yet
        cadence.record(step_s, cost_s, waited_s)
    return cadence


def test_nothing_is_chosen_until_every_rank_has_measured() -> None:
    cadence = measured(1.0, 9 * SHARE)
    assert not cadence.receive(cadence.own_need + Cadence().own_need, 2)
    assert cadence.every == 1
