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


def test_text_names_rank_node_phase_step_collective_and_stack_and_says_how_to_go_on() -> None:
    others = 'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in wait\n\n'
    stack = others + 'Current thread 0x2 (most recent call first):\n  File "b.py", line 9 in load'
    what = "evaluation, step 4, lasts longer than timeouts.eval_s = 600 s (noticed on rank 0)"
    found = diagnosis.Diagnosis(what, [WAITING, COMPUTING], [])
    assert diagnosis.text(found, {1: stack}, "runs/x/diagnosis.json").splitlines() == [
        (
            "  late: rank 1 on n2 (process 10, running), 300 s in step, step 7; "
            "has passed collective 30 (all_gather)"
        ),
        "        Current thread 0x2 (most recent call first):",
        '        File "b.py", line 9 in load',
        (
            "  not late: rank 0 on n1 (process 10, sleeping in futex_wait), 300 s in step, step 7; "
            "waits in collective 31 (all_gather)"
        ),
        "  state of every rank: runs/x/diagnosis.json",
        f"  {what}",
        "  if it needs longer: clipship resume runs/x --set timeouts.eval_s=SECONDS",
    ]


def test_thousands_of_late_ranks_do_not_fill_the_console() -> None:
    reports = [replace(WAITING, rank=rank) for rank in range(2000)]
    assert len(diagnosis.text(diagnosis.Diagnosis("what", reports, []), {}, "").splitlines()) < 20
