"""Schedules of faults in the simulated world, a small part of `make simulate`."""

from random import Random

import pytest

from tests.simulated.ranks import SimulatedRank
from tests.simulated.schedule import plan_of, run_schedule

SCHEDULES = 176


@pytest.fixture(autouse=True)
def patient() -> None:
    """Nobody is: on this clock a busy machine delays nothing."""


@pytest.mark.parametrize("first", range(0, SCHEDULES, 16))
def test_no_invariant_is_broken(first: int) -> None:
    broken = {seed: run_schedule(seed).problems for seed in range(first, first + 16)}
    assert not any(broken.values()), {seed: problems for seed, problems in broken.items() if problems}


def test_one_seed_is_one_schedule() -> None:
    first, again = run_schedule(1), run_schedule(1)
    assert (first.lines, first.simulated_s) == (again.lines, again.simulated_s)
    assert first.faults == again.faults


@pytest.mark.parametrize(
    ("seed", "launcher", "fault"),
    [
        # Its rank lived on beside the next generation: nobody waited for the lease of one that is stopped.
        (188, "keeps", "freeze supervisor"),
        # It had come back as a spare, led those beyond the cut, and took the last generation for another's.
        (2175, "keeps", "cut in two below node of"),
        # It was stopped before its new rank had a lease, which then never ran out.
        (10651, "keeps", "freeze supervisor"),
        # It heard the others close their connections, took them for dead, and was before the larger part.
        (4353, "keeps", "cut one way from node of"),
        # The ranks had saved a newer step before their coordinator had read the run folder.
        (329, "lost", "run folder slow at"),
        # A supervisor heard late that its old rank must end, and ended the new one.
        (1804, "keeps", "kill all on node of"),
        # What it had said of its old rank before it heard of the start was taken for the loss of the new one.
        (7495, "keeps", "kill supervisor"),
        # No supervisor could join any more, since the first claim had failed.
        (4712, "keeps", "run folder gone at"),
        # The smaller part claimed while the larger one waited for a rank that did not end.
        (8486, "keeps", "rank in an endless system call"),
        # The claim of a smaller part, which waited for members, kept the larger one from going on.
        (5197, "keeps", "cut in two below node of"),
        # The ranks had saved before the run folder was read, and the record named that step.
        (35107, "lost", "run folder slow at"),
    ],
)
def test_a_schedule_that_broke_an_invariant_breaks_none(seed: int, launcher: str, fault: str) -> None:
    outcome = run_schedule(seed)
    assert (outcome.plan.launcher, fault in {each.kind for each in outcome.faults}) == (launcher, True)
    assert not outcome.problems


def test_ranks_without_a_lease_are_found_to_outlive_their_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedRank, "renew_lease", lambda rank, lease_s: None)
    assert {invariant for invariant, _ in run_schedule(192).problems} == {"one generation"}


def test_worlds_have_2_to_64_supervisors() -> None:
    sizes = [plan.nodes * plan.per_node for plan in (plan_of(Random(seed)) for seed in range(300))]
    assert min(sizes) == 2
    assert 48 < max(sizes) <= 64
