"""A claim of a generation holds for the world that it names: those in it may pass it over."""

from dataclasses import dataclass, field

import pytest

from tests.support.stub_supervisor import StubSupervisor, run_state
from tests.support.stub_world import LIMITS
from trainer.run.exit_files import ExitFiles
from trainer.run.generations import GenerationClaim
from trainer.supervise.coordinate.fencing import Fence
from trainer.supervise.coordinate.generation_state import GenerationState
from trainer.supervise.coordinate.membership import WorldPlan
from trainer.supervise.coordinate.presence import Presence

WHOLE = WorldPlan(((0, "a"), (1, "b"), (2, "c")))
WITHOUT_2 = WorldPlan(((0, "a"), (1, "b")))


@dataclass
class Folder(StubSupervisor):
    """Claims in a run folder."""

    claims: dict[int, GenerationClaim] = field(default_factory=dict)

    async def claim(self, generation: int, world: str) -> GenerationClaim | None:
        if generation in self.claims:
            return self.claims[generation]
        self.claims[generation] = GenerationClaim("", generation, 0, "a", world=world)
        return None


def fenced(folder: Folder) -> tuple[Fence, GenerationState]:
    run = run_state(range(3), LIMITS, ExitFiles(""), folder)
    return Fence(run, Presence(run)), GenerationState(2, (0, 1, 2))


@pytest.mark.parametrize("other", [WITHOUT_2, None], ids=["another world", "the run's end"])
async def test_what_was_claimed_for_a_world_is_claimed_anew_for_anything_else(
    other: WorldPlan | None,
) -> None:
    fence, its = fenced(folder := Folder())
    assert await fence.is_ours(its, WHOLE)
    assert await fence.is_ours(its, WHOLE)
    assert its.number == 2
    assert await fence.is_ours(its, other)
    assert its.number == 3
    assert [claim.world for claim in folder.claims.values()] == [
        WHOLE.to_text(),
        other.to_text() if other else "",
    ]


async def test_what_was_claimed_for_no_world_holds_for_each() -> None:
    fence, its = fenced(folder := Folder())
    for world in (None, WHOLE, WITHOUT_2, None):
        assert await fence.is_ours(its, world)
    assert its.number == 2
    assert list(folder.claims) == [2]


async def test_the_claim_of_another_start_is_nobodys_own() -> None:
    """This one stood still until the run was started anew: each start has a supervisor of this number."""
    fence, its = fenced(folder := Folder())
    folder.claims[2] = GenerationClaim("another", 2, 0, "a", world=WITHOUT_2.to_text())
    assert not await fence.is_ours(its, WHOLE)
    assert folder.left == ["another start has generation 2: supervisor 0 on a"]
