"""A node that fails the preflight: a spare or fewer ranks take its place, or the run ends and names it."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.stub_world import LIMITS, StubWorld, four_nodes
from trainer.run.exit_record import ExitRecord, record_exit
from trainer.supervise.coordinate.membership import Membership

FEWER = replace(LIMITS, min_nodes=1)
WHY = "collectives give wrong values: rank 2 on n1: all_reduce: 1 of 65,536 values are wrong"
SAID = f"clipship: {WHY}; restart 1 of 20: "
WITHOUT = "without node n1: it has failed the preflight"


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


def begin_nothing(world: StubWorld) -> None:
    """Takes the ranks back to where they have done nothing that could be saved."""
    for node in world.members.values():
        if node.rank is not None:
            node.rank.heartbeat.begin_phase("init")


def end_of(world: StubWorld) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((world.folder / "exit.json").read_text())
    return found


@pytest.mark.parametrize(
    ("keys", "begun", "said"),
    [
        ({"spares": 1}, True, "all ranks start again from the beginning"),
        ({"limits": FEWER}, True, "6 ranks of 8 start again from the beginning"),
        ({"spares": 1}, False, "all ranks start again from the beginning"),
    ],
    ids=["spare", "fewer", "spare at the first start"],
)
async def test_a_generation_starts_without_the_node(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], keys: dict[str, Any], begun: bool, said: str
) -> None:
    world = await four_nodes(tmp_path, **keys)
    if not begun:
        begin_nothing(world)
    refuse(world, "n1", tmp_path)
    await world.agreed(2, 6)
    assert sorted({world.nodes[member] for member in world.world()}) == ["n0", "n2", "n3"]
    await world.end()
    assert f"{SAID}{said}; {WITHOUT}" in capfd.readouterr().err
    (restart,) = end_of(world)["restarts"]
    assert (restart["kind"], restart["rank"], restart["node"]) == ("unfit", 2, "n1")
    (row,) = restart["left_out"]
    assert (row["node"], row["kind"]) == ("n1", "unfit")


async def test_at_the_first_start_fewer_ranks_do_not_take_its_place(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    begin_nothing(world)
    refuse(world, "n1", tmp_path)
    for node in list(world.members.values()):
        assert await node.task == 1
    end = end_of(world)
    assert (end["exit_code"], end["rank"], end["node"], end["unfit"]) == (1, 2, "n1", "n1")
    assert end["reason"].startswith(WHY)
    assert not end["restarts"]


async def test_unfit_node_is_left_out_by_a_later_coordinator_too(tmp_path: Path) -> None:
    """It reads that in restarts.json."""
    world = await four_nodes(tmp_path, limits=FEWER)
    refuse(world, "n1", tmp_path)
    await world.agreed(2, 6)
    world.lose(0, 1)
    await world.agreed(3, 4)
    assert sorted(world.world()) == [4, 5, 6, 7]
    await world.end()


def test_unfit_node_is_no_part_of_a_world_however_small_that_is() -> None:
    its = Membership(range(4), 4, 1, (1, 2, 3, 4))
    for member in range(4):
        its.join(member, f"n{member // 2}")
    smaller = its.next_world(without="n0")
    assert smaller is not None
    assert smaller.numbers == (2, 3)
    its.exclude("n0", "unfit", "it has failed the preflight")
    its.exclude("n1", "condemned", "its network is slow")
    world = its.next_world()
    assert world is not None
    assert world.numbers == (2, 3), "a node that is only slow is better than none"
    its.exclude("n1", "unfit", "it has failed the preflight")
    assert its.next_world() is None
