"""Schedules of faults in the simulated world, a small part of `make simulate`."""

from random import Random

import pytest

from tests.simulated.ranks import SimulatedRank
from tests.simulated.schedule import plan_of, run_schedule

SCHEDULES = 48


@pytest.fixture(autouse=True)
def patient() -> None:
    """Nobody is: on this clock a busy machine delays nothing."""


@pytest.mark.parametrize("first", range(0, SCHEDULES, 8))
def test_no_invariant_is_broken(first: int) -> None:
    broken = {seed: run_schedule(seed).problems for seed in range(first, first + 8)}
    assert not any(broken.values()), {seed: problems for seed, problems in broken.items() if problems}


def test_one_seed_is_one_schedule() -> None:
    first, again = run_schedule(1), run_schedule(1)
    assert (first.lines, first.simulated_s) == (again.lines, again.simulated_s)
    assert first.faults == again.faults


@pytest.mark.parametrize(
    ("seed", "launcher", "fault"),
    [
        # Its rank lived on, since it heard all others, until they had been silent to it.
        (56, "keeps", "cut one way from node of"),
        # The ranks had kept a newer step in memory before their coordinator had read the run folder.
        (1409, "lost", "run folder slow at"),
        # Each restart waited anew for a rank that the kernel could not end: its supervisor had come back.
        (823, "keeps", "rank in an endless system call"),
    ],
)
def test_a_schedule_that_broke_an_invariant_breaks_none(seed: int, launcher: str, fault: str) -> None:
    outcome = run_schedule(seed)
    assert (outcome.plan.launcher, fault in {each.kind for each in outcome.faults}) == (launcher, True)
    assert not outcome.problems


def test_ranks_without_a_lease_are_found_to_outlive_their_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedRank, "renew_lease", lambda rank, lease_s: None)
    assert {invariant for invariant, _ in run_schedule(430).problems} == {"one generation"}


def test_worlds_have_2_to_64_supervisors() -> None:
    sizes = [plan.nodes * plan.per_node for plan in (plan_of(Random(seed)) for seed in range(300))]
    assert min(sizes) == 2
    assert 48 < max(sizes) <= 64
