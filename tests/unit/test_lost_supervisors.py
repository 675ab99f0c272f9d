"""Real supervisors with stub ranks: who goes on when some of them are lost, and with which ranks.

What only the order of events decides, the simulated world shows.
"""

import asyncio
import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.report_pages import status, written
from tests.support.stub_world import LIMITS, StubGeneration, StubWorld, four_nodes, until
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord, record_exit
from trainer.supervise import messages
from trainer.supervise.coordinate import presence

FEWER = replace(LIMITS, min_nodes=1)
Console = pytest.CaptureFixture[str]


def record(world: StubWorld, name: str) -> Any:
    return json.loads((world.folder / name).read_text())


def rank_of(world: StubWorld, member: int) -> StubGeneration:
    rank = world.members[member].rank
    assert rank is not None
    return rank


async def test_world_that_cannot_train_the_job_is_passed_over(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path, limits=replace(FEWER, even_nodes=True))
    world.lose(2)
    await world.agreed(2, 6)
    assert world.world() == {0: 0, 1: 1, 4: 2, 5: 3, 6: 4, 7: 5}
    assert await world.end() == [0] * 7, "the one without a rank leaves with the others"


async def test_failure_of_a_megabyte_is_cut_and_does_not_look_like_a_lost_supervisor(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path, limits=replace(LIMITS, same_fault_limit=1))
    stub = rank_of(world, 5)
    stub.folder = tmp_path / "rank"
    stub.folder.mkdir()
    long = ExitRecord(5, "n2", 1, "ValueError: no such class", 1.0, f"Traceback\n{'x' * 2**21}\nits end")
    record_exit(long, {"CLIPSHIP_RANK_DIR": str(stub.folder)})
    stub.rank.code = 1
    assert await world.codes() == [1] * 8
    end = record(world, "exit.json")
    assert (end["rank"], end["reason"].partition(";")[0]) == (5, "ValueError: no such class")
    assert "2,057,170 characters left out" in end["details"]
    assert (end["details"][:9], end["details"][-7:]) == ("Traceback", "its end")


@pytest.mark.parametrize("member", [2, 5], ids=["its successor", "another"])
async def test_request_to_stop_that_a_lost_coordinator_had_got_is_not_lost(
    tmp_path: Path, member: int
) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    asked = world.members[member]
    world.lose(0, 1)
    with patch.object(asked.tree, "up"):  # it is on its way to the lost one
        asked.supervisor.on_signal(signal.SIGUSR2)
    assert await world.codes() == [75] * 6
    assert record(world, "exit.json")["reason"].startswith("asked to stop")


async def test_supervisor_that_may_live_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def is_refused(*about: object) -> bool:
        asked.append(about)
        return False

    monkeypatch.setattr(presence, "is_refused", is_refused)
    world = await four_nodes(tmp_path, limits=FEWER)
    world.lose(2, 3)
    await until(lambda: asked)
    await until(lambda: all(node.rank is None for node in world.members.values()))
    await asyncio.sleep(2.0)
    assert not world.world(), "nobody starts while 3 may still come"
    await world.agreed(2, 6)
    await world.end()


async def test_supervisor_that_was_taken_for_lost_ends_its_rank_before_it_starts_another(
    tmp_path: Path,
) -> None:
    world = await four_nodes(tmp_path)
    its, rank = world.members[7], rank_of(world, 7)
    assert its.tree is not None
    its.tree.from_above(messages.Start(2, {}, "0 1 n0\n2 3 n1\n4 5 n2\n6 7 n3"))
    await until(lambda: its.rank is not None and its.rank.number == 2)
    assert rank.ended
    world.lose(*range(8))


async def test_a_late_rank_whose_coordinator_does_not_hear_of_it_ends_alone(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path)
    its, rank = world.members[7], rank_of(world, 7)
    rank.heartbeat.limits = {"step": 1.0}
    rank.heartbeat.begin_phase("step", 6)
    with patch.object(its.tree, "up"):
        assert await its.task == 124
    assert "timed out: step, step 6, lasts longer than" in record(world, "exit.json")["reason"]
    world.lose(*range(7))


async def test_condemned_node_is_left_out_from_the_next_restart_on(tmp_path: Path, capfd: Console) -> None:
    world = await four_nodes(tmp_path, spares=1)
    rank_of(world, 0).folder = folder = tmp_path / "rank"
    folder.mkdir()
    why = "rank 2 there took 3.0 times the median for 100 steps"
    (folder / "condemned.json").write_text(json.dumps({"n1": why}))
    said = ""
    while not said:
        await asyncio.sleep(0.1)
        said = capfd.readouterr().err
    assert said == f"clipship: node n1: {why}; it is left out from the next restart on\n"
    assert sorted(world.world()) == [0, 1, 2, 3, 4, 5], "it serves until then"
    world.fail(5)
    await world.agreed(2, 6)
    assert sorted(world.world()) == [0, 1, 4, 5, 6, 7]
    await world.end()
    assert status(written(tmp_path))["left out"] == f"node n1: {why}"


async def test_supervisor_that_comes_back_is_taken_in_after_the_ranks_have_saved(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    world.lose(5)
    await world.agreed(2, 7)
    world.begin(5, again="1")
    ranks = [node.rank for node in world.members.values() if node.rank is not None]
    await until(lambda: all(rank.heartbeat.stop_requested for rank in ranks))
    for rank in ranks:
        rank.rank.code = 75
    await world.agreed(3, 8)
    assert await world.end() == [0] * 8
    restart = record(world, "exit.json")["restarts"][-1]
    assert (restart["kind"], restart["ranks"], restart["left_out"]) == ("taken in", 8, [])
    assert (restart["rank"], restart["cause"]) == (5, "1 supervisor came back")


async def test_claim_of_a_coordinator_that_died_before_it_started_the_generation_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked = ExitFiles.newest_claim, []

    async def answers_late(self: ExitFiles) -> Any:
        asked.append(self)
        if len(asked) == 1:
            raise TimeoutError
        return await ask(self)

    monkeypatch.setattr(ExitFiles, "newest_claim", answers_late)
    world = await four_nodes(tmp_path, limits=FEWER)
    claim = {"start": world.rendezvous.start, "generation": 2, "member": 0, "node": "n0"}
    (tmp_path / "generations").mkdir(exist_ok=True)
    (tmp_path / "generations" / "00002.json").write_text(json.dumps(claim))
    world.lose(0)
    await world.agreed(3, 7)
    await world.end()
    assert record(world, "generations/00003.json")["member"] == 2
    assert record(world, "exit.json")["exit_code"] == 0


@pytest.mark.parametrize(
    ("tries", "goes_on"), [("1", True), ("2", True), ("2", False)], ids=["once", "again", "in vain"]
)
async def test_supervisor_that_cannot_join_leaves_a_run_that_goes_on_alone(
    tries: str, goes_on: bool, tmp_path: Path, capfd: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_going_on(self: ExitFiles) -> bool:
        return goes_on

    monkeypatch.setattr(ExitFiles, "is_going_on", is_going_on)
    world = StubWorld(["n0", "n1"], tmp_path, replace(FEWER, init_s=0.1), respawns=True)
    assert await world.begin(1, again=tries).task == 124
    said = capfd.readouterr().err
    told = "supervisor 1 on n1 cannot join the run again: init: rank 0's supervisor" in said
    assert told == (tries == "1")
    assert (tmp_path / "exit.json").exists() is not goes_on
    assert goes_on or "rank 0's supervisor does not answer" in record(world, "exit.json")["reason"]


async def test_a_run_whose_disk_stays_full_ends_with_its_reason(
    tmp_path: Path, capfd: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await four_nodes(tmp_path, limits=replace(FEWER, init_s=0.5))
    fsync = os.fsync

    def full(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if "/generations/" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    world.lose(2)
    assert set(await world.codes()) == {1}
    said = capfd.readouterr().err
    assert f"{tmp_path}: No space left on device; waiting up to 0 s for it" in said
    assert "the run folder takes no claim of generation 2: No space left on device" in said
    assert "lost the network" not in said


async def test_supervisor_that_continues_after_the_end_of_the_run_leaves(tmp_path: Path) -> None:
    """Nobody answers it any more, as if it were the last one alive; but exit.json is there."""
    world = await four_nodes(tmp_path, limits=FEWER)
    end = {"rank": 0, "node": "n0", "exit_code": 75, "reason": "asked to stop", "time": 1.0}
    (tmp_path / "exit.json").write_text(json.dumps({**end, "start": world.rendezvous.start}))
    world.lose(*(member for member in range(8) if member != 2))
    assert await world.members[2].task == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exit.json", "generations"]
    assert record(world, "exit.json")["exit_code"] == 75


async def test_a_node_that_is_unfit_to_train_is_left_out_by_a_later_coordinator_too(tmp_path: Path) -> None:
    """It reads that in restarts.json."""
    world = await four_nodes(tmp_path, limits=FEWER)
    for member, rank in world.world().items():  # all ranks find the same in the preflight
        stub = rank_of(world, member)
        stub.folder = tmp_path / f"rank-{rank}"
        stub.folder.mkdir()
        own = ExitRecord(rank, world.nodes[member], 1, "wrong values: rank 2", time.time(), unfit="n1")
        record_exit(own, {"CLIPSHIP_RANK_DIR": str(stub.folder)})
        stub.rank.code = 1
    await world.agreed(2, 6)
    world.lose(0, 1)
    await world.agreed(3, 4)
    assert sorted(world.world()) == [4, 5, 6, 7]
    await world.end()
