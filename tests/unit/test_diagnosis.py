"""Who was late, and what the console says of it."""

from dataclasses import replace

import pytest

from trainer.supervise.coordinate import diagnosis
from trainer.supervise.rank.rank_report import RankReport

WAITING = RankReport(0, "n1", 10, "step", 7, 300.5, 300.0, 31, "all_gather", True, "sleeping", "futex_wait")
COMPUTING = replace(WAITING, rank=1, node="n2", collectives=30, waiting=False, state="running", kernel="")


@pytest.mark.parametrize(
    ("reports", "late"),
    [
        ([WAITING, COMPUTING, replace(WAITING, rank=2)], [1]),
        ([WAITING, replace(WAITING, rank=2, state="stopped by a signal")], [2]),
        ([WAITING, replace(COMPUTING, collectives=31)], [1]),
        ([WAITING, replace(WAITING, rank=1)], [0, 1]),
    ],
    ids=[
        "one that has begun fewer collectives",
        "a stopped one, whatever it has begun",
        "of equal ones those that wait in no collective",
        "all, where all wait in the same collective",
    ],
)
def test_late_ranks_are_named(reports: list[RankReport], late: list[int]) -> None:
    assert diagnosis.Diagnosis("what", reports, []).to_json(124, {})["late"] == late


def test_thousands_of_late_ranks_do_not_fill_the_console() -> None:
    reports = [replace(WAITING, rank=rank) for rank in range(2000)]
    assert len(diagnosis.text(diagnosis.Diagnosis("what", reports, []), {}, "").splitlines()) < 20
