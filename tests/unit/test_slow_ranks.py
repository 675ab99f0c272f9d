"""Who is slow: told by all ranks every few steps, named when it lasts, and not for trifles."""

from trainer.telemetry.stragglers import SlowRank, SlowRanks


def exchanged(ranks: list[SlowRanks], seconds: list[float]) -> list[float]:
    """A telling of all ranks, each of which takes so many seconds a step: the sums."""
    for own, its in zip(ranks, seconds, strict=True):
        assert not own.due
        own.record(its)
        assert own.due
    return [sum(shares) for shares in zip(*(own.contribution() for own in ranks), strict=True)]


def test_rank_that_stays_slow_is_named_with_its_time_and_the_median() -> None:
    ranks = [SlowRanks(rank, 3, 1.5) for rank in range(3)]
    assert ranks[0].receive(exchanged(ranks, [1.0, 1.1, 2.0])) == []
    assert ranks[0].receive(exchanged(ranks, [1.0, 1.1, 2.0])) == [SlowRank(2, 2.0, 1.1, 2)]
    assert ranks[0].receive(exchanged(ranks, [1.0, 1.1, 2.0])) == [], "not at each telling"


def test_slow_steps_that_do_not_follow_each_other_are_forgotten() -> None:
    ranks = [SlowRanks(rank, 2, 1.5) for rank in range(2)]
    for seconds in ([1.0, 9.0], [1.0, 1.0], [1.0, 9.0]):
        assert ranks[1].receive(exchanged(ranks, seconds)) == []


def test_differences_of_milliseconds_are_ignored() -> None:
    ranks = [SlowRanks(rank, 2, 1.5) for rank in range(2)]
    for _ in range(4):
        assert ranks[0].receive(exchanged(ranks, [0.001, 0.009])) == []
