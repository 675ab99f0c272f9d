"""The cost of keeping a step in memory decides how often one is kept."""

from trainer.checkpoint.memory_keeper import Cadence

SHARE = 0.02
"""Largest share of a step's time that keeping it may take."""


def measured(step_s: float, cost_s: float, waited_s: float = 0.0) -> Cadence:
    cadence = Cadence()
    while cadence.own_need < 0:  # not measured yet
        cadence.record(step_s, cost_s, waited_s)
    return cadence


def test_each_step_is_kept_while_it_is_measured_and_if_it_is_cheap() -> None:
    cadence = measured(1.0, SHARE / 2)
    assert (cadence.every, cadence.chosen) == (1, False)
    assert cadence.receive(2 * cadence.own_need, ranks=2)
    assert (cadence.every, cadence.chosen, cadence.share) == (1, True, SHARE / 2)
    assert cadence.is_due(7)


def test_every_kth_step_is_kept_so_that_the_cost_stays_below_the_limit() -> None:
    cadence = measured(1.0, 2.5 * SHARE)
    assert cadence.receive(cadence.own_need, ranks=1)
    assert cadence.every == 3
    assert [step for step in range(1, 10) if cadence.is_due(step)] == [3, 6, 9]


def test_one_slow_step_changes_nothing() -> None:
    cadence = Cadence()
    for step_s, cost_s in ((100.0, SHARE / 2), (1.0, 50.0)):
        cadence.record(step_s, cost_s)
    while cadence.own_need < 0:
        cadence.record(1.0, SHARE / 2)
    assert cadence.share == SHARE / 2


def test_ranks_choose_the_same_from_the_sum_and_only_once() -> None:
    cheap, dear = measured(1.0, 0.0), measured(1.0, 4 * SHARE)
    total = cheap.own_need + dear.own_need
    assert cheap.receive(total, 2)
    assert dear.receive(total, 2)
    assert cheap.every == dear.every == 3
    assert not cheap.receive(total, 2)


def test_nothing_is_chosen_until_every_rank_has_measured() -> None:
    cadence = measured(1.0, 9 * SHARE)
    assert not cadence.receive(cadence.own_need + Cadence().own_need, 2)
    assert cadence.every == 1


def test_choice_of_the_ranks_before_is_kept() -> None:
    cadence = Cadence(4)
    assert cadence.chosen
    assert not cadence.receive(0.0, 2)
    assert cadence.every == 4


def test_a_copy_that_lasts_several_steps_is_begun_when_the_one_before_is_complete() -> None:
    cadence = measured(0.1, 0.0, waited_s=0.24)
    assert cadence.receive(cadence.own_need, ranks=1)
    assert (cadence.every, cadence.share, round(cadence.beside, 6)) == (4, 0.0, 3.4)


def test_a_copy_that_lasts_a_little_longer_than_a_step_is_waited_for() -> None:
    cadence = measured(1.0, 0.0, waited_s=SHARE)
    assert cadence.receive(cadence.own_need, ranks=1)
    assert cadence.every == 1
