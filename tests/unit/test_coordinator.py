"""Decisions that rank 0's supervisor makes from messages: how the run ends, who goes on, and what is told."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.stub_supervisor import STOP, Story, done, failed, lost
from trainer.supervise import messages
from trainer.supervise.coordinate import diagnosis, states
from trainer.supervise.coordinate.coordinator_host import ParentLoss
from trainer.supervise.rank.rank_report import RankReport

# Who was late, and what the console says of it.

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


# What rank 0's supervisor decides.
# The subjects: the first cause, exit codes, requests to stop, diagnoses, claims of a generation, rosters.

NO_RESTARTS: dict[str, Any] = {"max_restarts": 0, "checkpoint_s": 0.3, "shutdown_s": 0.3}
OTHER_STOP = messages.StopRequest(15, 1, "n1")
ALL_SAVED = done(0, 75), done(1, 75)
GONE = "its supervisor is gone: its connection closed"


def joined(signalled: bool) -> list[messages.Message]:
    """Both join anew and know of a request to stop, which they got as a signal or heard of."""
    return [messages.Joined(rank, f"n{rank}", asked=True, signalled=signalled) for rank in (0, 1)]


CONNECTION = failed(0, waiting=True, cause="connection reset")
SAVED = "asked to stop during an evaluation"
THEN = "asked to stop; then killed"
THEN_GONE = "asked to stop; then its supervisor is gone"
SECOND = "a second signal"
# fmt: off
ENDS: dict[str, tuple[dict[str, Any], list[messages.Message | float], int, int, str]] = {
    "all are done":
        (NO_RESTARTS, [done(0), done(1)], 0, 0, "done"),
    "a failure outside of a collective comes before one inside, whatever arrives first":
        (NO_RESTARTS, [CONNECTION, lost(0), failed(1, code=2, cause="no file", at=2.0)], 1, 2, "no file"),
    "the earlier of two similar failures counts":
        (NO_RESTARTS, [failed(0, cause="later", at=2.0), failed(1, code=7, cause="earlier")], 1, 7,
         "earlier"),
    "a killed rank comes before what failed because of it":
        (NO_RESTARTS, [failed(0, cause="connection reset"), failed(1, killed=True)], 1, 1, "killed"),
    "a supervisor that is gone":
        (NO_RESTARTS, [lost(1)], 1, 1, GONE),
    "a node that reaches nobody names itself":
        (NO_RESTARTS, [messages.Cut(0, "n0", "rank 1 on n1")], 0, 1,
         "its node has lost the network: it can no longer reach rank 1 on n1"),
    "a rank that stays behind when others are done is timed out":
        (NO_RESTARTS, [done(0)], 0, 124, "timeouts.shutdown_s"),

    "a lost supervisor comes before what failed because of it, where others are kept":
        ({**NO_RESTARTS, "launcher": "keeps"}, [CONNECTION, lost(1)], 1, 1, GONE),
    "and after it where the launcher ends all after a failure":
        (NO_RESTARTS, [failed(0, cause="connection reset"), lost(1)], 0, 1, "connection reset"),
    "no supervisor answers":
        (NO_RESTARTS, [messages.Late(1, "init lasts too long")], 0, 124,
         "rank 0 on n0: its supervisor does not answer"),
    "ranks ignore a request to stop":
        (NO_RESTARTS, [STOP], 0, 124, "the run was asked to stop and had not ended after 0.6 s"),
    "the reason of a stopped run is the rank's own":
        (NO_RESTARTS, [done(0, 75, reason=SAVED), done(1, 75, reason=SAVED)], 0, 75, SAVED),
    # Restarts are allowed, and nevertheless there is none.
    "bad input":
        ({}, [failed(1, code=2)], 1, 2, "killed"),
    "a failure before anything was done":
        ({"begun": False}, [failed(1)], 1, 1, "killed"),
    "a lost supervisor whose launcher ends all":
        ({}, [lost(1)], 1, 1, GONE),
    "a node that is cut off from the others":
        ({}, [messages.Cut(1, "n1", "rank 0 on n0")], 1, 1, "can no longer reach rank 0 on n0"),
    # Requests to stop. Loader processes that die are noticed after seconds, and the request comes before.
    "a fault in the work of a rank that was asked to stop meanwhile":
        ({}, [STOP, failed(1, saving=False)], 1, 75, THEN),
    "a stop that comes while the newest checkpoint is looked for":
        ({"checkpoint_read_s": 2.0}, [failed(1, saving=False), 1.0, STOP], 1, 75, THEN),
    "a fault of a rank that saves":
        ({}, [STOP, failed(1, saving=True)], 1, 1, "killed"),
    "a loss after a request to stop":
        ({"launcher": "keeps"}, [STOP, lost(1)], 1, 75, THEN_GONE),
    "a loss after a rank has saved":
        ({}, [STOP, done(0, 75, reason="asked to stop"), lost(1)], 1, 75, THEN_GONE),
    "signals of a launcher that ends all after a failure":
        ({"launcher": "always"}, [STOP, 10.0, failed(1, saving=False), STOP], 1, 75, THEN),

    "a signal that a user repeats ends the run at once":
        (NO_RESTARTS, [replace(STOP, signal=2), replace(STOP, signal=2, again=True)], 0, 130, SECOND),
    "a signal that comes twice at once is one request":
        ({}, [STOP, STOP, *ALL_SAVED], 0, 75, ""),
    "a signal that comes again after a while":
        ({}, [STOP, 10.0, STOP], 0, 143, SECOND),
    "a node that is drained while ranks save for another one":
        ({}, [STOP, 10.0, OTHER_STOP, 10.0, replace(STOP, outside=True), 10.0, *ALL_SAVED], 0, 75, ""),
    "a signal before a supervisor joined is its first":
        ({}, [*joined(signalled=True), 10.0, replace(OTHER_STOP, signal=2)], 1, 130, SECOND),
    "a request of which supervisors only know, from a lost coordinator":
        ({}, [*joined(signalled=False), 10.0, replace(OTHER_STOP, signal=2), *ALL_SAVED], 0, 75, ""),
}
# fmt: on


@pytest.mark.parametrize(("of", "told", "rank", "code", "said"), ENDS.values(), ids=ENDS)
async def test_what_the_supervisors_tell_decides_how_the_run_ends(
    tmp_path: Path, of: dict[str, Any], told: list[messages.Message | float], rank: int, code: int, said: str
) -> None:
    story = Story(tmp_path, **of)
    await story.tell(*told)
    record = await story.ended()
    assert (record.rank, record.exit_code) == (rank, code)
    assert said in f"{record.reason}\n{record.details}"
    assert messages.End(code) in story.said
    assert [shown.exit_code for shown in story.shown] == ([code] if code else [])
    assert "asked to stop" not in record.reason or code == 75 or code == 124
    assert messages.Regroup not in story.kinds


async def test_stop_before_the_first_step_is_done_waits_for_no_rank_once_all_can_hear_of_it(
    tmp_path: Path,
) -> None:
    story = Story(tmp_path, joined=[0], begun=False)
    await story.tell(STOP, 0.1)
    assert story.code is None, "rank 1's supervisor has not come yet"
    assert story.said == [messages.Stop()]
    await story.tell(messages.Joined(member=1, node="n1"))
    record = await story.ended()
    assert record.exit_code == 75
    assert "before there was anything to save" in record.reason
    roster = messages.Roster(1, "0 2 n0", "", ((2, ("h", 1)),))
    await story.its.take_over(roster, 1, 1, ())  # its own `Joined` has told of the request
    await asyncio.sleep(1.0)
    assert story.code == 75, "a run that has ended is not taken over"


async def test_late_rank_makes_a_diagnosis_of_all(tmp_path: Path) -> None:
    story = Story(tmp_path, members=3, **NO_RESTARTS)
    await story.tell(messages.Late(what="step, step 7, lasts too long", generation=1))
    await story.heard(messages.Collect)
    for report in (WAITING, COMPUTING, replace(WAITING, rank=2)):
        await story.tell(messages.Report(report=report, generation=1))
    await story.heard(messages.CollectStacks)
    assert story.said[-1] == messages.CollectStacks(ranks=(1, 0)), "the late one, and one that waits"
    await story.tell(*(messages.Stack(rank=rank, stack=f"stack of {rank}", generation=1) for rank in (1, 0)))
    record = await story.ended()
    assert (record.rank, record.node, record.exit_code) == (1, "n2", 124)
    assert "stack of 1" in record.details
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert (found["exit_code"], found["late"], len(found["ranks"])) == (124, [1], 3)


async def test_the_end_names_the_bad_nodes_also_those_that_nobody_could_replace(tmp_path: Path) -> None:
    """A batch script that queues the job again excludes them."""
    story = Story(tmp_path, "keeps", members=3)
    for node in ("n0", "n2"):
        await story.tell(messages.BadNode(1, node, "its network is slow"))
    await story.tell(failed(0, code=2))
    assert (await story.ended()).left_out == ("n0", "n2")
    told = (tmp_path / "artefacts" / "launcher.env").read_text()
    assert "\nleft_out=n0\nleft_out=n2\n" in told, "as the batch script reads it"
    assert story.lines == [], "they serve, since nobody could take their places"


# Claims: of two parts of a cut network, only one may start the next generation.


def claims(folder: Path) -> dict[int, str]:
    """The worlds for which generations are claimed."""
    found = [json.loads(path.read_text()) for path in (folder / "generations").glob("*[0-9].json")]
    return {claim["generation"]: claim["world"] for claim in found}


FEWER: dict[str, Any] = {"members": 3, "min_nodes": 1, "world_sizes": (1, 2, 3)}
WITHOUT_2 = "0 0 n0\n1 1 n1"


async def test_a_coordinator_that_waits_for_members_claims_nothing(tmp_path: Path) -> None:
    story = Story(tmp_path, "respawns")
    await story.tell(lost(1))
    await story.until(lambda: story.lines)
    assert "waiting up to 300 s for the launcher to start a supervisor again" in story.lines[0]
    await story.tell(messages.Joined(1, "n1", idle=True))
    assert claims(tmp_path) == {}
    await story.restarted(2)
    assert claims(tmp_path) == {2: "0 0 n0\n1 1 n1"}


async def test_the_claim_of_another_start_is_nobodys_own(tmp_path: Path) -> None:
    """This one stood still until the run was started anew: each start has a supervisor of this number."""
    (tmp_path / "generations").mkdir()
    claim = {"start": "another", "generation": 2, "member": 0, "node": "a", "world": WITHOUT_2}
    (tmp_path / "generations" / "00002.json").write_text(json.dumps(claim))
    story = Story(tmp_path, "keeps", **FEWER)
    await story.tell(lost(2))
    await story.until(lambda: story.left_to)
    assert story.left_to == ["another start has generation 2: supervisor 0 on a"]
    assert story.said == [messages.Regroup(2)]


# Who is there: rosters, and those who do not end.


async def test_roster_is_sent_at_once_when_a_generation_has_started(tmp_path: Path) -> None:
    """A supervisor that has none cannot go on without its coordinator, and would end the run."""
    story = Story(tmp_path, "keeps")
    await story.tell(failed(1))
    await story.restarted(2)
    assert story.rosters[-1].generation == 2


async def test_a_rank_that_does_not_end_is_left_behind_by_those_that_can_go_on(tmp_path: Path) -> None:
    story = Story(tmp_path, "keeps", **FEWER, obedient=False)
    await story.tell(failed(1))
    await story.heard(messages.Regroup)
    began = asyncio.get_running_loop().time()
    await story.tell(messages.Ended(2, 0), messages.Ended(2, 1), 25.0)
    assert messages.Start not in story.kinds
    assert (await story.restarted(2)).world == WITHOUT_2
    waited_s = asyncio.get_running_loop().time() - began
    assert waited_s > 32.5, "until the other part of a cut network has surely ended its rank"
    assert "2 ranks of 3" in story.lines[-1]
    await story.tell(messages.Joined(2, "n2"), 10.0)
    assert story.kinds[-1] is messages.Start, "it has found its way back, and its rank lives still"


async def test_too_few_that_nobody_brings_back_end_the_run(tmp_path: Path) -> None:
    story = Story(tmp_path, "keeps", members=3)
    await story.tell(lost(1))
    too_few = "2 supervisors of 3 are left, and without recovery.min_nodes, the run needs 3 ranks"
    assert (await story.ended()).reason.endswith(f"; no restart, since {too_few}")


async def test_a_lost_spare_ends_nothing_and_is_named(tmp_path: Path) -> None:
    story = Story(tmp_path, "keeps", spares=1)
    await story.tell(lost(1), 1.0)
    assert story.said == []
    assert story.lines == [
        f"clipship: supervisor 1 on n1, which has no rank: {GONE}; its node failed, or the process was killed"
    ]


# The table of states; what follows from it in any order of events, the simulated world shows.


def test_an_event_that_a_state_does_not_have_is_refused_by_name() -> None:
    assert states.following(states.State.RUNNING, states.Event.FAULT) is states.State.DECIDING
    with pytest.raises(RuntimeError, match=r"START \(every supervisor is told .*\) in state RUNNING"):
        states.following(states.State.RUNNING, states.Event.START)


def test_every_state_is_reached_from_the_first_and_leads_to_the_end() -> None:
    reached = {states.State.STARTING}
    for _ in states.State:
        reached |= {after for state in reached for after in states.TABLE[state].leads_to.values()}
    assert reached == set(states.State) == set(states.TABLE)
    for state in set(states.State) - {states.State.ENDED}:
        leads_to = states.TABLE[state].leads_to
        assert states.Event.CUT_OFF in leads_to
        # Ranks that train leave first, or a failure is decided on.
        assert (states.Event.END in leads_to) == (state is not states.State.RUNNING)
    assert not states.TABLE[states.State.ENDED].leads_to
    assert not states.TABLE[states.State.ENDED].takes


def test_whatever_is_told_about_ranks_is_taken_in_some_state() -> None:
    taken = set().union(*(row.takes for row in states.TABLE.values()))
    assert set(messages.AboutRank.__subclasses__()) <= taken


def test_page_on_architecture_draws_each_state_and_event() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    drawn = page.partition("### States of a run")[2].partition("### The life of a fault")[0]
    assert [
        each.name for each in (*states.State, *states.Event) if each.name not in re.findall(r"[A-Z_]+", drawn)
    ] == []


@pytest.mark.parametrize("has_rank", [False, True])
async def test_loss_above_one_that_has_had_no_rank_is_not_the_run_s_end(
    tmp_path: Path, has_rank: bool
) -> None:
    """It came back a moment ago, so it has no roster; the others may go on without the one above it."""
    ways: list[str] = []

    async def end_unjoined(*_: object) -> None:
        ways.append("unjoined")

    async def end_alone(*_: object) -> None:
        ways.append("alone")

    rank = SimpleNamespace(poll=lambda: None) if has_rank else None
    own: Any = SimpleNamespace(generation=rank, state=lambda: SimpleNamespace(late=False))
    ending: Any = SimpleNamespace(end_unjoined=end_unjoined, end_alone=end_alone)
    story = Story(tmp_path)
    loss = ParentLoss(story.context, own, ending, story.host)
    loss.handle(messages.Orphaned(0, "n0", "its connection closed"))
    await asyncio.sleep(1.0)
    assert ways == ["alone" if has_rank else "unjoined"]
