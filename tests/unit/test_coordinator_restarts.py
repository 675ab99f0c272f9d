"""Decisions of rank 0's supervisor after a fault when `[recovery]` allows restarts, told by messages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.stub_supervisor import MEETING, STOP, Story, done, failed, lost
from trainer.supervise import messages
from trainer.supervise.coordinate import membership
from trainer.world.restart_policy import Fault, RestartPolicy


def checkpoint(folder: Path, step: int) -> None:
    whole = folder / "checkpoints" / f"step-{step:08d}"
    whole.mkdir(parents=True)
    (whole / "manifest.json").touch()


async def test_run_goes_on_without_a_supervisor_that_has_never_joined(tmp_path: Path) -> None:
    """A rank hangs, since it waits for one whose supervisor may still come until init_s."""
    story = Story(tmp_path, "keeps", members=3, joined=[0, 1], min_nodes=2, world_sizes=(2, 3))
    await story.tell(messages.Late(what="step, step 7 lasts longer than 12 s", generation=1))
    await story.heard(messages.Regroup)
    await story.tell(messages.Ended(member=2, generation=2))  # its own `messages.Joined` is still on its way
    assert (await story.restarted(2)).world == "0 0 n0\n1 1 n1"


@pytest.mark.parametrize("kept", [4, 8])
async def test_stop_while_ranks_start_again_waits_only_if_memory_has_more_than_the_checkpoint(
    kept: int, tmp_path: Path
) -> None:
    """Ranks may take minutes to their first step, with nothing to save."""
    checkpoint(tmp_path, 4)
    story = Story(tmp_path, obedient=False)
    await story.tell(failed(1))
    await story.heard(messages.Regroup)
    await story.tell(*(messages.Ended(2, rank, in_memory=kept) for rank in (0, 1)))
    await story.restarted(2)
    story.begun = False  # they read their state from memory
    await story.tell(STOP)
    await story.until(lambda: messages.Stop in story.kinds or story.code is not None)
    assert (messages.Stop in story.kinds) is (story.code is None) is (kept == 8)
    saved = "asked to stop: step 8 is saved"
    await story.tell(*(done(rank, 75, generation=2, reason=saved) for rank in (0, 1)))
    end = await story.ended()
    assert (end.exit_code, end.reason == saved) == (75, kept == 8)


async def test_stop_during_the_wait_before_a_restart_leaves_with_75(tmp_path: Path) -> None:
    story = Story(tmp_path, backoff_s=600.0)
    await story.tell(failed(1))
    await story.restarted(2)
    await story.tell(failed(0, 2))
    await story.until(lambda: len(story.lines) == 2)
    assert story.lines[1].startswith("clipship: rank 0 on n0, generation 2: killed; restart 2 of 2 in ")
    await story.tell(STOP)
    assert (await story.ended()).exit_code == 75


LOST = "its supervisor is gone"
NO_RESTART = "killed; and a hint; no restart, since "


@pytest.mark.parametrize(
    ("of", "then", "rank", "reason"),
    [
        ({"obedient": False}, [lost(1)], 1, f"{LOST}: its connection closed; "),
        ({"obedient": False}, [messages.Ended(2, 1)], 0, f"{NO_RESTART}rank 0 did not end in 30 s"),
        ({"no_port": True}, [], 0, f"{NO_RESTART}the ranks cannot meet again: no free port"),
    ],
    ids=["a supervisor is lost", "a rank does not end", "the ranks cannot meet again"],
)  # fmt: skip
async def test_what_comes_between_two_generations_may_end_the_run(
    tmp_path: Path, of: dict[str, Any], then: list[messages.Message], rank: int, reason: str
) -> None:
    story = Story(tmp_path, **of)
    await story.tell(failed(0, code=7))
    await story.heard(messages.Regroup)
    await story.tell(*then)
    end = await story.ended()
    assert (end.rank, end.exit_code) == (rank, 1 if then == [lost(1)] else 7)
    assert end.reason.startswith(reason)


async def test_parts_of_a_restart_come_from_rank_0_where_the_coordinator_does_not_have_it(
    tmp_path: Path,
) -> None:
    story = Story(tmp_path)
    await story.tell(failed(1))
    await story.restarted(2)
    ages = {"connected": 0.2, "stepped": 0.0}
    await story.tell(0.4)
    assert story.restarts[0]["seconds"] is None, "step 5 was done before"
    await story.tell(messages.Progress(generation=2, steps_done=6, begun=True, ages=ages))
    await story.until(lambda: "redone" in story.restarts[0]["parts"])
    parts = story.restarts[0]["parts"]
    assert [*parts] == ["detect", "end", "agree", "connect", "first_step", "redone"]
    assert parts["first_step"] == pytest.approx(0.2, abs=0.02)
    assert story.restarts[0]["seconds"] == round(sum(parts.values()), 1)


OUT_OF_REACH = "clipship: step 5 is only in the memory of n0, which has no rank now: "


@pytest.mark.parametrize(
    ("saved", "joined", "where", "told"),
    [
        (5, False, "go on from step 5", []),
        (4, True, "go on from step 4", [OUT_OF_REACH + "the newest checkpoint, step 4, serves"]),
        (0, False, "start again from the beginning", [OUT_OF_REACH + "there is no checkpoint"]),
    ],
)
async def test_checkpoint_serves_if_only_a_node_without_a_rank_has_a_newer_step(
    tmp_path: Path, saved: int, joined: bool, where: str, told: list[str]
) -> None:
    """Node n0 has failed twice, so that n1, which was a spare, has the only rank of the third generation.

    What n0 has in memory it says as its rank ends, or as it comes back.
    """
    if saved:
        checkpoint(tmp_path, saved)
    story = Story(tmp_path, "keeps", spares=1, max_restarts=9, obedient=False)
    for generation, step in (2, 3), (3, 5):
        await story.tell(failed(0, generation - 1, step=step + 1))
        await story.regrouped(generation)
        own = (
            messages.Joined(0, "n0", idle=True, in_memory=step)
            if joined
            else messages.Ended(generation, 0, in_memory=step)
        )
        await story.tell(own, messages.Ended(generation, 1, in_memory=0))
        if generation == 3:
            await story.heard(messages.Meet)
            await story.tell(messages.Meeting(generation, MEETING))
        start = await story.restarted(generation)
    assert start.world == "1 1 n1"
    line = next(line for line in story.lines if "restart 2 of 9" in line)
    assert line.endswith(f"all ranks {where}; without node n0: it has failed 2 times")
    assert [line for line in story.lines if "only in the memory" in line] == told


async def test_rank_0_that_is_lost_before_it_says_where_to_meet_is_not_waited_for(tmp_path: Path) -> None:
    story = Story(tmp_path, "keeps", members=3, min_nodes=1, world_sizes=(1, 2, 3), member=2)
    await story.tell(failed(1))
    await story.heard(messages.Meet)
    assert story.said[-1] == messages.Meet(0, 2)
    await story.tell(lost(0))
    await story.until(lambda: messages.Meet(1, 2) in story.said)
    await story.tell(messages.Meeting(2, problem="no free port"))
    assert (await story.ended()).reason.endswith(
        "no restart, since the ranks cannot meet again: no free port"
    )


async def test_a_supervisor_that_comes_too_late_for_a_regroup_is_told_of_it(tmp_path: Path) -> None:
    story = Story(tmp_path, "keeps", joined=[0], obedient=False)
    await story.tell(failed(0))
    await story.heard(messages.Regroup)
    await story.tell(messages.Ended(2, 0), messages.Joined(1, "n1"), 1.0)
    assert story.said == [messages.Regroup(2), messages.Regroup(2)]
    await story.tell(messages.Ended(2, 1))
    await story.restarted(2)


# Which members of a run make its next world, and which faults it survives: no clock, process or file.


def joined(
    nodes: str, spares: int = 0, sizes: tuple[int, ...] = (1, 2, 4, 8), fewest: int = 0, **of: bool
) -> membership.Membership:
    """Members on these nodes, one letter each, who are all there; the last ones are spares."""
    wanted = len(nodes) - spares
    its = membership.Membership(range(len(nodes)), wanted, fewest or wanted, sizes, **of)
    for member, node in enumerate(nodes):
        its.join(member, node)
    return its


EVEN: dict[str, Any] = {"nodes": 4 * "a" + 4 * "b" + 4 * "c", "sizes": (1, 2, 3, 4, 6, 12), "fewest": 3}
EVEN["even_nodes"] = True


LOSSES: dict[str, tuple[dict[str, Any], list[int], tuple[int, ...] | None]] = {
    "one lost, no fewer allowed": ({}, [3], None),
    "the whole spare node takes the place of one that lost one": ({"spares": 4}, [3], (0, 1, 4, 5)),
    "both spare nodes": ({"spares": 4}, [0, 1, 2], (4, 5, 6, 7)),
    "half of the ranks, which can share the batch": ({"fewest": 2}, [2, 3], (0, 1, 4, 5)),
    "whole nodes before others": ({"fewest": 2}, [1], (2, 3, 4, 5)),
    "too few": ({"fewest": 4}, [0, 1, 2, 3, 4], None),
    "sizes that are not known": ({"fewest": 1, "sizes": ()}, [0], None),
    "even: a node": (EVEN, [8, 9, 10, 11], (0, 1, 2, 4, 5, 6)),
    "even: one of a node, too": (EVEN, [1, 8, 9, 10, 11], (0, 2, 3, 4, 5, 6)),
    "even: one of each": (EVEN, [0, 1, 2, 5, 6, 7, 9, 10, 11], (3, 4, 8)),
}


def numbers(its: membership.Membership) -> tuple[int, ...] | None:
    world = its.next_world()
    return None if world is None else world.numbers


@pytest.mark.parametrize(("of", "lost", "world"), LOSSES.values(), ids=LOSSES)
def test_world_after_losses(of: dict[str, Any], lost: list[int], world: tuple[int, ...] | None) -> None:
    its = joined(**{"nodes": "aabbccdd", **of})
    for member in lost:
        its.lose(member)
    assert numbers(its) == world


def test_node_with_two_faults_is_left_out_if_the_rest_makes_as_large_a_world() -> None:
    its = joined("aabbccdd", spares=2, sizes=(2, 4, 6))
    its.record_fault("b")
    assert numbers(its) == (0, 1, 2, 3, 4, 5)
    its.record_fault("b")
    assert numbers(its) == (0, 1, 4, 5, 6, 7)
    its.lose(7)
    assert numbers(its) == (0, 1, 2, 4, 5, 6), "as few of it as possible, if the others are too few"


def test_unfit_node_is_no_part_of_a_world_however_small_that_is() -> None:
    its = joined("aabb", fewest=1)
    its.exclude("a", "unfit", "it has failed the preflight")
    its.exclude("b", "condemned", "its network is slow")
    assert numbers(its) == (2, 3), "a node that is only slow is better than none"
    its.exclude("b", "unfit", "it has failed the preflight")
    assert numbers(its) is None


# Which faults are the same, and how long a run waits before it goes on.

FAULT = Fault(1, "n1", 812, "killed by SIGKILL in step, step 812")


@pytest.mark.parametrize(
    ("cause", "one", "other"),
    [
        ("connection to [10.0.0.{}]:{} refused, handle 0x7f{}", (1, 22, "ab"), (2, 4711, 99)),
        ("longer than {} s, learned from the last {} (99 % took at most {} s)", (12, 150, 0.7), (9, 300, 1)),
    ],
    ids=["addresses", "a hang with another learned limit"],
)
def test_causes_may_differ_in_their_numbers(cause: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    first, second = (replace(FAULT, cause=cause.format(*numbers)) for numbers in (one, other))
    assert first.is_like(replace(second, node="n7")), "rank 1 may be elsewhere by then"
    assert not first.is_like(replace(second, cause="RuntimeError: closed"))


@pytest.mark.parametrize(
    ("jitter", "expected"), [(0.0, [0, 4, 8, 16, 32, 32, 32]), (1.0, [0, 2, 4, 8, 16, 16, 16])]
)
def test_wait_doubles_up_to_eight_times_and_at_most_half_of_it_is_left_out(
    jitter: float, expected: list[int]
) -> None:
    its = RestartPolicy(10, 2, 4.0, jitter=lambda: jitter)
    waits: list[Any] = [its.decide(replace(FAULT, step=step), 0) for step in range(1, 8)]
    assert [wait.wait_s for wait in waits] == expected


# Who is left out, as restarts.json has it and as people read it.
