"""Real supervisors with stub ranks: who goes on when some of them are lost, and with which ranks."""

import asyncio
import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.stub_world import LIMITS, StubWorld, four_nodes, until
from trainer.errors import EXIT_PREEMPTED, EXIT_TIMED_OUT
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import RANK_DIR, ExitRecord, record_exit
from trainer.run.generations import GenerationClaim
from trainer.supervise.coordinate import presence, recovery
from trainer.supervise.coordinate.membership import exclusions_text
from trainer.supervise.machine import Machine
from trainer.supervise.rank.own_rank import OwnRank
from trainer.world.condemned import condemn

FEWER = replace(LIMITS, min_nodes=1)


def claim_second(world: StubWorld, member: int, node: str, its_world: str = "") -> None:
    """Claims generation 2 for the member, as its coordinator does."""
    its = {"start": world.rendezvous.start, "generation": 2, "member": member, "node": node}
    its |= {"world": its_world} if its_world else {}
    (world.folder / "generations").mkdir(exist_ok=True)
    (world.folder / "generations" / "00002.json").write_text(json.dumps(its))


def record(world: StubWorld, name: str) -> Any:
    return json.loads((world.folder / name).read_text())


async def test_lost_supervisor_leaves_fewer_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    world.lose(2)
    await world.agreed(2, 7)
    assert world.world() == {0: 0, 1: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}
    rank = world.members[3].rank
    assert rank is not None
    place = rank.place
    assert (place.local_rank, place.local_size, place.slot) == (0, 1, 1)
    assert await world.end() == [0] * 7
    (restart,) = record(world, "exit.json")["restarts"]
    assert (restart["kind"], restart["ranks"]) == ("lost", 7)
    (gone,) = restart["left_out"]
    assert 0 <= gone.pop("since") - restart["time"] < 60
    assert gone == {"node": "n1", "kind": "gone", "reason": "gone", "members": [2]}
    assert exclusions_text([gone]) == ["1 supervisor on n1: gone"]
    assert "restart 1 of 20: 7 ranks of 8" in capfd.readouterr().err
    assert record(world, "generations/00002.json")["member"] == 0


@pytest.mark.parametrize(
    ("limits", "ranks"),
    [
        ({"world_sizes": (1, 2, 4, 8)}, {0: 0, 1: 1, 4: 2, 5: 3}),
        ({"even_nodes": True}, {0: 0, 1: 1, 4: 2, 5: 3, 6: 4, 7: 5}),
    ],
    ids=["a batch that 7 ranks cannot share", "nodes of unequal size"],
)
async def test_world_that_cannot_train_the_job_is_passed_over(
    tmp_path: Path, limits: dict[str, Any], ranks: dict[int, int]
) -> None:
    world = await four_nodes(tmp_path, limits=replace(FEWER, **limits))
    world.lose(2)
    await world.agreed(2, len(ranks))
    assert world.world() == ranks
    assert await world.end() == [0] * 7, "those without a rank leave with the others"


async def test_failure_of_a_megabyte_is_cut_and_does_not_look_like_a_lost_supervisor(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path, limits=replace(LIMITS, same_fault_limit=1))
    stub = world.members[5].rank
    assert stub is not None
    stub.folder = tmp_path / "rank"
    stub.folder.mkdir()
    long = ExitRecord(5, "n2", 1, "ValueError: no such class", 1.0, f"Traceback\n{'x' * 2**21}\nits end")
    record_exit(long, {RANK_DIR: str(stub.folder)})
    stub.rank.code = 1
    assert await asyncio.gather(*(node.task for node in world.members.values())) == [1] * 8
    end = record(world, "exit.json")
    assert (end["rank"], end["reason"].partition(";")[0]) == (5, "ValueError: no such class")
    assert "2,057,170 characters left out" in end["details"]
    assert (end["details"][:9], end["details"][-7:]) == ("Traceback", "its end")


async def test_lost_coordinator_is_followed_by_one_of_another_node(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    world.fail(5)
    await world.agreed(2, 8)
    await asyncio.sleep(1.5)  # the roster of this generation travels
    world.lose(0, 1)
    await world.agreed(3, 6)
    assert world.world() == {2: 0, 3: 1, 4: 2, 5: 3, 6: 4, 7: 5}
    world.fail(7)
    await world.agreed(4, 6)
    assert await world.end() == [0] * 6
    kinds = [(restart["generation"], restart["kind"]) for restart in record(world, "exit.json")["restarts"]]
    assert kinds == [(2, "fault"), (3, "lost"), (4, "fault")], (
        "the new coordinator knows the earlier restarts"
    )
    assert record(world, "generations/00003.json")["member"] == 2


@pytest.mark.parametrize("member", [2, 5], ids=["its successor", "another"])
async def test_request_to_stop_that_a_lost_coordinator_had_got_is_not_lost(
    tmp_path: Path, member: int
) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    asked = world.members[member].supervisor
    tree = asked._context.tree
    assert tree is not None
    world.lose(0, 1)
    with patch.object(tree, "up"):  # it is on its way to the lost one
        asked.on_signal(signal.SIGUSR2)
    codes = await asyncio.gather(*(node.task for node in world.members.values()))
    assert codes == [EXIT_PREEMPTED] * 6
    assert record(world, "exit.json")["reason"].startswith("asked to stop")


async def test_machine_that_refuses_calls_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "ORPHANS_S", 1e6)
    world = await four_nodes(tmp_path, limits=FEWER)
    world.lose(2, 3)  # 3 is below 2, and nobody else would notice that it is gone, too
    await world.agreed(2, 6)
    await until(lambda: world.knows(6))
    world.lose(0, 1)  # the new coordinator waits for 1, which was below the old one
    await world.agreed(3, 4)
    await world.end()


async def test_supervisor_that_may_live_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "ORPHANS_S", 1e6)
    asked = []

    async def is_refused(address: tuple[str, int], machine: Machine) -> bool:
        asked.append(address)
        return False

    monkeypatch.setattr(presence, "is_refused", is_refused)
    world = await four_nodes(tmp_path, limits=FEWER)
    world.lose(2, 3)
    await until(lambda: asked)
    await until(lambda: all(node.rank is None for node in world.members.values()))
    await asyncio.sleep(0.3)
    assert not world.world(), "nobody starts while 3 may still come"
    monkeypatch.setattr(presence, "ORPHANS_S", 0.0)
    await world.agreed(2, 6)
    await world.end()


async def test_rank_0_that_is_lost_before_it_answers_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "REGROUP_S", 1e6)
    world = await four_nodes(tmp_path, spares=1, limits=FEWER)
    answer = OwnRank.answer_meeting

    async def lose_it(own: OwnRank, generation: int) -> None:
        monkeypatch.setattr(OwnRank, "answer_meeting", answer)
        world.lose(own._context.world.rank)

    world.fail(0)
    await world.agreed(2, 6)
    monkeypatch.setattr(OwnRank, "answer_meeting", lose_it)
    world.fail(1)  # its node has failed twice, so the next rank 0 is another member
    await until(lambda: 2 not in world.members)
    await until(lambda: sorted(world.world().values()) == list(range(6)))
    await world.end()


async def test_condemned_node_is_left_out_from_the_next_restart_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = await four_nodes(tmp_path, spares=1)
    folder = tmp_path / "rank"
    folder.mkdir()
    rank = world.members[0].rank
    assert rank is not None
    rank.folder = folder
    condemn("n1", "rank 2 there took 3.0 times the median for 100 steps", {RANK_DIR: str(folder)})
    coordinator = world.members[0].coordinator
    assert coordinator is not None
    await until(lambda: coordinator._run.membership.excluded)
    assert sorted(world.world()) == [0, 1, 2, 3, 4, 5], "it serves until then"
    world.fail(5)
    await world.agreed(2, 6)
    assert sorted(world.world()) == [0, 1, 4, 5, 6, 7]
    await world.end()
    why = "node n1: rank 2 there took 3.0 times the median for 100 steps"
    assert f"clipship: {why}; it is left out from the next restart on" in capfd.readouterr().err
    (restart,) = record(world, "exit.json")["restarts"]
    assert exclusions_text(restart["left_out"]) == [why]


async def test_coordinator_and_its_successor_are_lost_at_once(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    world.lose(0, 2)
    await world.agreed(2, 6)
    await world.end()


async def test_loss_during_a_regroup_leaves_those_who_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await four_nodes(tmp_path, limits=replace(FEWER, backoff_s=0.0))
    world.lose(7)
    await until(lambda: all(node.rank is None for node in world.members.values()), 0.001)
    world.lose(0, 6)
    await until(lambda: sorted(world.world().values()) == list(range(5)))
    assert sorted(world.world()) == [1, 2, 3, 4, 5]
    await world.end()


async def test_too_few_that_nobody_brings_back_end_the_run(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path)
    world.lose(2)
    assert set(await asyncio.gather(*(node.task for node in world.members.values()))) == {1}
    reason = record(world, "exit.json")["reason"]
    assert "its supervisor is gone" in reason
    assert (
        "no restart, since 7 supervisors of 8 are left, and without recovery.min_nodes, the run needs 8 ranks"
        in reason
    )


async def test_run_waits_for_a_supervisor_that_its_launcher_starts_again(tmp_path: Path) -> None:
    world = await four_nodes(tmp_path, respawns=True)
    world.lose(0)
    await asyncio.sleep(1.0)
    assert world.world() == {}
    world.begin(0, again="1")
    await world.agreed(2, 8)
    await world.end()


async def test_supervisor_that_comes_back_is_taken_in_after_the_ranks_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "GROW_S", 0.2)
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


@pytest.mark.parametrize("its_world", ["", "4 7 n2"], ids=["not known", "of others"])
async def test_half_that_loses_the_claim_leaves_and_writes_nothing(tmp_path: Path, its_world: str) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    claim_second(world, 5, "n2", its_world)
    world.lose(2)
    tasks = [node.task for node in world.members.values()]
    assert set(await asyncio.gather(*tasks)) == {1}
    assert [path.name for path in tmp_path.iterdir()] == ["generations"]


async def test_claim_of_a_generation_that_cannot_run_without_this_supervisor_is_passed_over(
    tmp_path: Path,
) -> None:
    """Its coordinator's node may have lost its power before it told anybody to start."""
    world = await four_nodes(tmp_path, limits=FEWER)
    claim_second(world, 5, "n2", "0 1 n0\n3 3 n1\n4 5 n2\n6 7 n3")
    world.lose(2)
    await world.agreed(3, 7)
    assert await world.end() == [0] * 7
    third = record(world, "generations/00003.json")
    assert (third["member"], third["world"]) == (0, "0 1 n0\n3 3 n1\n4 5 n2\n6 7 n3")


@pytest.mark.parametrize("tries", ["1", "2"])
async def test_supervisor_that_cannot_join_leaves_a_run_that_goes_on_alone(
    tries: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def goes_on(self: ExitFiles) -> bool:
        return True

    monkeypatch.setattr(ExitFiles, "is_going_on", goes_on)
    world = StubWorld(["n0", "n1"], tmp_path, replace(FEWER, init_s=0.1), respawns=True)
    assert await world.begin(1, again=tries).task == EXIT_TIMED_OUT
    assert not (tmp_path / "exit.json").exists()
    said = capfd.readouterr().err
    assert ("supervisor 1 on n1 cannot join the run again: init: rank 0's supervisor" in said) == (
        tries == "1"
    )


async def test_supervisor_that_cannot_join_an_ended_run_says_why(tmp_path: Path) -> None:
    world = StubWorld(["n0", "n1"], tmp_path, replace(FEWER, init_s=0.1), respawns=True)
    assert await world.begin(1, again="2").task == EXIT_TIMED_OUT
    assert "rank 0's supervisor does not answer" in record(world, "exit.json")["reason"]


async def test_run_folder_that_does_not_answer_for_a_while_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []
    claim = ExitFiles.claim

    async def answers_late(self: ExitFiles, its: GenerationClaim) -> GenerationClaim | None:
        if its.generation == 1:  # when the first of the others comes
            return await claim(self, its)
        tries.append(its.generation)
        if len(tries) == 2:  # the file is made after all, once nobody waits for the answer
            await claim(self, its)
        if len(tries) <= 2:
            raise TimeoutError("the run folder does not answer")
        return await claim(self, its)

    monkeypatch.setattr(ExitFiles, "claim", answers_late)
    world = await four_nodes(tmp_path, limits=FEWER)
    world.lose(2)
    await world.agreed(3, 7)
    assert await world.end() == [0] * 7
    assert tries == [2, 2, 2, 3], "the first number is taken, though by this coordinator"
    assert capfd.readouterr().err.count("the run folder does not answer; waiting up to 20 s") == 1


async def test_a_disk_that_is_full_during_a_restart_is_named_at_once_and_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await four_nodes(tmp_path, limits=FEWER)
    full = refused_claims(monkeypatch, errno.ENOSPC, times=3)
    world.lose(2)
    await world.agreed(2, 7)
    assert await world.end() == [0] * 7
    assert len(full) == 3
    said = capfd.readouterr().err
    assert said.count(f"{tmp_path}: No space left on device; waiting up to 20 s for it") == 1
    assert sorted(path.name for path in (tmp_path / "generations").iterdir()) == ["00001.json", "00002.json"]


async def test_a_run_whose_disk_stays_full_ends_with_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await four_nodes(tmp_path, limits=replace(FEWER, init_s=0.5))
    refused_claims(monkeypatch, errno.ENOSPC, times=100)
    world.lose(2)
    assert set(await asyncio.gather(*(node.task for node in world.members.values()))) == {1}
    said = capfd.readouterr().err
    assert "the run folder takes no claim of generation 2: No space left on device" in said
    assert "lost the network" not in said


def refused_claims(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[str]:
    """Refuses so many writes of files of claims, as their file system would; returns the files."""
    fsync = os.fsync
    refused: list[str] = []

    def failing(file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        if "/generations/" in path and len(refused) < times:
            refused.append(path)
            raise OSError(number, os.strerror(number), path)
        fsync(file)

    monkeypatch.setattr(os, "fsync", failing)
    return refused


def late(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lets a question to the run folder have no answer the first time."""
    ask, asked = getattr(ExitFiles, name), []

    async def answers_late(self: ExitFiles) -> Any:
        asked.append(name)
        if len(asked) == 1:
            raise TimeoutError
        return await ask(self)

    monkeypatch.setattr(ExitFiles, name, answers_late)


async def test_next_coordinator_counts_on_though_the_run_folder_answers_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await four_nodes(tmp_path, limits=replace(FEWER, max_restarts=1))
    world.fail(5)
    await world.agreed(2, 8)
    await asyncio.sleep(1.5)  # the roster of this generation travels
    late(monkeypatch, "restarts")
    world.lose(0)
    assert set(await asyncio.gather(*(node.task for node in world.members.values()))) == {1}
    assert [row["generation"] for row in record(world, "restarts.json")["restarts"]] == [2]
    assert "all that recovery.max_restarts allows" in record(world, "exit.json")["reason"]


async def test_take_over_with_a_slow_run_folder_blames_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who join meanwhile have lost their ranks by the loss of the coordinator."""
    ask = ExitFiles.restarts

    async def slowly(self: ExitFiles) -> Any:
        await asyncio.sleep(1.0)
        return await ask(self)

    monkeypatch.setattr(ExitFiles, "restarts", slowly)
    world = await four_nodes(tmp_path, limits=FEWER)
    world.lose(0)
    await world.agreed(2, 7)
    await asyncio.sleep(1.0)
    assert await world.end() == [0] * 7
    (row,) = record(world, "exit.json")["restarts"]
    assert (row["generation"], row["kind"], row["rank"], row["node"]) == (2, "lost", 0, "n0")


async def test_coordinator_that_was_stopped_leaves_those_who_went_on_alone(tmp_path: Path) -> None:
    """When it continues, all connections to it are closed, as if the others had died."""
    world = await four_nodes(tmp_path, limits=FEWER)
    claim_second(world, 2, "n1")
    world.lose(*range(2, 8))
    assert set(await asyncio.gather(world.members[0].task, world.members[1].task)) == {1}
    assert sorted(path.name for path in tmp_path.rglob("*.json*")) == ["00001.json", "00002.json"]


async def test_supervisor_that_continues_after_the_end_of_the_run_leaves(tmp_path: Path) -> None:
    """Nobody answers it any more, as if it were the last one alive; but exit.json is there."""
    world = await four_nodes(tmp_path, limits=FEWER)
    end = {"rank": 0, "node": "n0", "exit_code": 75, "reason": "asked to stop", "time": 1.0}
    (tmp_path / "exit.json").write_text(json.dumps({**end, "start": world.rendezvous.start}))
    world.lose(*(member for member in range(8) if member != 2))
    assert await world.members[2].task == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exit.json", "generations"]
    assert record(world, "exit.json")["exit_code"] == 75


@pytest.mark.parametrize("is_late", [False, True], ids=["", "the run folder answers late"])
async def test_claim_of_a_coordinator_that_died_before_it_started_the_generation_is_passed_over(
    tmp_path: Path, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_late:
        late(monkeypatch, "newest_claim")
    world = await four_nodes(tmp_path, limits=FEWER)
    claim_second(world, 0, "n0")
    world.lose(0)
    await world.agreed(3, 7)
    await world.end()
    assert record(world, "generations/00003.json")["member"] == 2
    assert record(world, "exit.json")["exit_code"] == 0
