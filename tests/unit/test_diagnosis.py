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


def test_where_a_supervisor_is_missing_its_rank_is_late_and_no_other() -> None:
    found = diagnosis.Diagnosis("what", [WAITING, COMPUTING], [diagnosis.Missing(2, "n3")])
    assert found.late_or_missing() == [(2, "n3")]
    assert found.to_json(124, {})["late"] == [2]


def test_text_names_rank_node_phase_step_collective_and_stack() -> None:
    others = 'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in wait\n\n'
    stack = others + 'Current thread 0x2 (most recent call first):\n  File "b.py", line 9 in load'
    shown = diagnosis.text(
        diagnosis.Diagnosis("what", [WAITING, COMPUTING], []), {1: stack}, "runs/x/diagnosis.json"
    )
    assert shown.splitlines() == [
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
    ]


def test_text_ends_with_the_limit_and_how_to_go_on() -> None:
    what = "evaluation, step 4, lasts longer than timeouts.eval_s = 600 s (noticed on rank 0)"
    shown = diagnosis.text(
        diagnosis.Diagnosis(what, [COMPUTING], []), {1: "a stack"}, "runs/x/diagnosis.json"
    )
    assert shown.splitlines()[-2:] == [
        f"  {what}",
        "  if it needs longer: clipship resume runs/x --set timeouts.eval_s=SECONDS",
    ]


def test_text_tells_a_node_that_is_gone_from_a_rank_that_never_came() -> None:
    shown = diagnosis.text(
        diagnosis.Diagnosis("what", [WAITING], [diagnosis.Missing(1, "n2"), diagnosis.Missing(2, "")]), {}, ""
    )
    assert (
        "late: rank 1 on n2: its supervisor does not answer; "
        "the node has failed, is frozen or has lost the network"
    ) in shown
    assert "late: rank 2, which never joined" in shown


def test_thousands_of_late_ranks_do_not_fill_the_console() -> None:
    reports = [replace(WAITING, rank=rank) for rank in range(2000)]
    assert len(diagnosis.text(diagnosis.Diagnosis("what", reports, []), {}, "").splitlines()) < 20
