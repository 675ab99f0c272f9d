"""A node that fails the preflight: a spare or fewer ranks take its place, or the run ends and names it."""

import time
from dataclasses import replace
from pathlib import Path

from tests.support.stub_world import LIMITS, StubWorld, four_nodes
from trainer.run.exit_record import ExitRecord, record_exit

FEWER = replace(LIMITS, min_nodes=1)
WHY = "collectives give wrong values: rank 2 on n1: all_reduce: 1 of 65,536 values are wrong"


def refuse(world: StubWorld, node: str, folder: Path) -> None:
    """Ends all ranks as the preflight does that finds one node unfit; each rank writes the same."""
    for member, rank in world.world().items():
        stub = world.members[member].rank
        assert stub is not None
        stub.folder = folder / f"rank-{rank}"
        stub.folder.mkdir()
        own = ExitRecord(rank, world.nodes[member], 1, f"{WHY}; advice", time.time(), unfit=node)
        record_exit(own, {"CLIPSHIP_RANK_DIR": str(stub.folder)})
        stub.rank.code = 1


async def test_unfit_node_is_left_out_by_a_later_coordinator_too(tmp_path: Path) -> None:
    """It reads that in restarts.json."""
    world = await four_nodes(tmp_path, limits=FEWER)
    refuse(world, "n1", tmp_path)
    await world.agreed(2, 6)
    world.lose(0, 1)
    await world.agreed(3, 4)
    assert sorted(world.world()) == [4, 5, 6, 7]
    await world.end()
