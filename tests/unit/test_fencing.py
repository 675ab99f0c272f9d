"""A claim of a generation holds for the world that it names: those in it may pass it over."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from tests.support.stub_actions import StubActions
from tests.support.stub_world import LIMITS
from trainer.run.exit_files import ExitFiles
from trainer.run.generations import GenerationClaim
from trainer.supervise.coordinate.fencing import Fence
from trainer.supervise.coordinate.generation_state import GenerationState
from trainer.supervise.coordinate.membership import WorldPlan
from trainer.supervise.coordinate.presence import Presence
from trainer.supervise.coordinate.run_state import RunState

WHOLE = WorldPlan(((0, "a"), (1, "b"), (2, "c")))
WITHOUT_2 = WorldPlan(((0, "a"), (1, "b")))


@dataclass
class Folder(StubActions):
    """Claims in a run folder."""

    claims: dict[int, GenerationClaim] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    async def claim(self, generation: int, world: str) -> GenerationClaim | None:
        if generation in self.claims:
            return self.claims[generation]
        self.claims[generation] = GenerationClaim("", generation, 0, "a", world=world)
        return None

    def leave(self, other: str) -> None:
        self.left.append(other)


def fenced(folder: Folder, story: Callable[[Fence, GenerationState], Awaitable[None]]) -> None:
    async def play() -> None:
        run = RunState(range(3), LIMITS, ExitFiles(""), folder)
        await story(Fence(run, Presence(run)), GenerationState(2, (0, 1, 2)))

    asyncio.run(play())


@pytest.mark.parametrize("other", [WITHOUT_2, None], ids=["another world", "the run's end"])
def test_what_was_claimed_for_a_world_is_claimed_anew_for_anything_else(other: WorldPlan | None) -> None:
    async def story(fence: Fence, its: GenerationState) -> None:
        assert await fence.is_ours(its, WHOLE)
        assert await fence.is_ours(its, WHOLE)
        assert its.number == 2
        assert await fence.is_ours(its, other)
        assert its.number == 3

    fenced(folder := Folder(), story)
    assert [claim.world for claim in folder.claims.values()] == [
        WHOLE.to_text(),
        other.to_text() if other else "",
    ]


def test_what_was_claimed_for_no_world_holds_for_each() -> None:
    async def story(fence: Fence, its: GenerationState) -> None:
        for world in (None, WHOLE, WITHOUT_2, None):
            assert await fence.is_ours(its, world)
        assert its.number == 2

    fenced(folder := Folder(), story)
    assert list(folder.claims) == [2]
