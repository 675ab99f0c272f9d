"""Who was late, and what the console says of it."""

from dataclasses import replace

from trainer.supervise.coordinate.diagnosis import Diagnosis, Missing, late_ranks, text
from trainer.supervise.rank.rank_report import RankReport

WAITING = RankReport(0, "n1", 10, "step", 7, 300.5, 300.0, 31, "all_gather", True, "sleeping", "futex_wait")
COMPUTING = replace(WAITING, rank=1, node="n2", collectives=30, waiting=False, state="running", kernel="")


def ranks(reports: list[RankReport]) -> list[int]:
    return [report.rank for report in reports]


def test_rank_that_has_begun_fewer_collectives_is_late() -> None:
    assert ranks(late_ranks([WAITING, COMPUTING, replace(WAITING, rank=2)])) == [1]


def test_stopped_rank_is_late_whatever_it_has_begun() -> None:
    stopped = replace(WAITING, rank=2, state="stopped by a signal")
    assert ranks(late_ranks([WAITING, stopped])) == [2]


def test_of_equal_ranks_those_that_wait_in_no_collective_are_late() -> None:
    assert ranks(late_ranks([WAITING, replace(COMPUTING, collectives=31)])) == [1]


def test_where_all_wait_in_the_same_collective_all_are_named() -> None:
    assert ranks(late_ranks([WAITING, replace(WAITING, rank=1)])) == [0, 1]


def test_where_a_supervisor_is_missing_its_rank_is_late_and_no_other() -> None:
    found = Diagnosis("what", [WAITING, COMPUTING], [Missing(2, "n3")])
    assert found.late_or_missing() == [(2, "n3")]
    assert found.to_json(124, {})["late"] == [2]


def test_text_names_rank_node_phase_step_collective_and_stack() -> None:
    others = 'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in wait\n\n'
    stack = others + 'Current thread 0x2 (most recent call first):\n  File "b.py", line 9 in load'
    shown = text(Diagnosis("what", [WAITING, COMPUTING], []), {1: stack}, "runs/x/diagnosis.json")
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
    shown = text(Diagnosis(what, [COMPUTING], []), {1: "a stack"}, "runs/x/diagnosis.json")
    assert shown.splitlines()[-2:] == [
        f"  {what}",
        "  if it needs longer: clipship resume runs/x --set timeouts.eval_s=SECONDS",
    ]


def test_text_tells_a_node_that_is_gone_from_a_rank_that_never_came() -> None:
    shown = text(Diagnosis("what", [WAITING], [Missing(1, "n2"), Missing(2, "")]), {}, "")
    assert (
        "late: rank 1 on n2: its supervisor does not answer; "
        "the node has failed, is frozen or has lost the network"
    ) in shown
    assert "late: rank 2, which never joined" in shown


def test_thousands_of_late_ranks_do_not_fill_the_console() -> None:
    reports = [replace(WAITING, rank=rank) for rank in range(2000)]
    assert len(text(Diagnosis("what", reports, []), {}, "").splitlines()) < 20
