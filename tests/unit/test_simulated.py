"""Schedules of faults in the simulated world, a small part of `make simulate`."""

from random import Random

import pytest

from tests.simulated.ranks import SimulatedRank
from tests.simulated.schedule import plan_of, run_schedule

SCHEDULES = 48


@pytest.mark.parametrize("first", range(0, SCHEDULES, 8))
def test_no_invariant_is_broken(first: int) -> None:
    broken = {seed: run_schedule(seed).problems for seed in range(first, first + 8)}
    assert not any(broken.values()), {seed: problems for seed, problems in broken.items() if problems}


def test_one_seed_is_one_schedule() -> None:
    first, again = run_schedule(1), run_schedule(1)
    assert (first.lines, first.simulated_s) == (again.lines, again.simulated_s)
    assert first.faults == again.faults


def test_a_start_again_on_a_slow_folder_tells_the_step_from_which_its_ranks_really_went_on() -> None:
    """They had kept a newer one in memory before their coordinator had read the run folder."""
    outcome = run_schedule(125)
    assert (outcome.plan.launcher, outcome.faults[1].kind) == ("always", "run folder slow at")
    assert not outcome.problems


def test_ranks_without_a_lease_are_found_to_outlive_their_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedRank, "renew_lease", lambda rank, lease_s: None)
    outcome = run_schedule(55)
    assert [invariant for invariant, _ in outcome.problems] == ["one generation"]


def test_worlds_have_2_to_64_supervisors() -> None:
    sizes = [plan.nodes * plan.per_node for plan in (plan_of(Random(seed)) for seed in range(300))]
    assert min(sizes) == 2
    assert 48 < max(sizes) <= 64
