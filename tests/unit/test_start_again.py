"""Runs that their launcher starts again, since it ends all when one is gone, as MPI does."""

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import stub_world
from tests.support.jobs import tiny_job
from tests.support.stub_supervisor import STOP, Story, done, failed, lost
from trainer.launch import local
from trainer.launch.start_again import asked_after, run_generations
from trainer.run import launcher_word
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.supervise import messages
from trainer.world.rendezvous import Rendezvous

AGAIN = 76
"""Exit code with which all leave to be started again."""


def begun(folder: Path, launcher: str = "always", **of: Any) -> Story:
    """A coordinator of two ranks of one generation, with step 4 in memory."""
    return Story(folder, launcher, **{"kept": 4, "obedient": False, **of})


async def begin_and_ask(story: Story) -> None:
    """Begins its generation, until it has asked for the case that all are killed."""
    await story.its.begin()
    await story.until(lambda: story.word.get("word") == "again-if-killed")


def take_word(folder: Path) -> None:
    """Takes the request for the case that all are killed, as the batch script does."""
    with (folder / "artefacts" / "launcher.env").open("a") as file:
        file.write(f"word=again\ntime={time.time()}\n")


def columns(story: Story, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in story.restarts]


async def test_the_next_coordinator_counts_on_and_ends_the_run_for_good(tmp_path: Path) -> None:
    """Two restarts are allowed; the coordinator of each generation is another process.

    New steps in memory do not begin the count anew: only a checkpoint does.
    """
    codes = []
    for generation in (1, 2, 3):
        step = 5 * generation
        story = begun(tmp_path, generation=generation, step=float(step), kept=step - 1)
        await story.its.begin()
        await story.tell(
            failed(generation % 2, generation, cause=f"cause {chr(96 + generation)}", at=time.time())
        )
        codes.append(await story.left())
    assert codes == [AGAIN, AGAIN, 1]
    end = await story.ended()
    assert end.generation == 3
    assert "2 restarts without a new checkpoint" in end.reason
    assert [row["generation"] for row in end.restarts] == [2, 3]
    assert story.asked_after(2) == 0, "the run has ended"


async def test_same_fault_is_counted_though_mpi_killed_the_coordinators_that_saw_it(tmp_path: Path) -> None:
    for generation in (2, 3):
        story = begun(tmp_path, generation=generation)
        record = ExitRecord(1, "n1", 1, "killed; and a hint", 1.0)
        await story.request(record, steps_done=5, in_memory=4, fault_step=6)
        await story.its.begin()
        await story.tell(0.1)
        if generation == 2:
            assert story.code is None
            story.its.close()
            assert columns(story, "kind", "rank", "step") == [("fault", 1, 6)]
    end = await story.ended()
    assert end.exit_code == 1
    assert "the same fault at the same step 2 times in a row" in end.reason


@pytest.mark.parametrize("moment", ["while ranks are being ended", "during the wait"])
async def test_supervisor_lost_during_a_restart_lets_the_launcher_start_all_again(
    moment: str, tmp_path: Path
) -> None:
    story = begun(tmp_path, "lost", backoff_s=600.0, max_restarts=4)
    generation = 3 if moment == "during the wait" else 2
    if generation == 3:  # the first restart without a new step does not wait
        await story.tell(failed(0, 1, cause="first"))
        await story.heard(messages.Regroup)
        await story.tell(messages.Ended(2, 0), messages.Ended(2, 1))
        await story.restarted(2)
    await story.tell(failed(0, generation - 1))
    await story.regrouped(generation)
    await story.tell(messages.Ended(generation, 0))
    if generation == 3:
        await story.tell(messages.Ended(3, 1))
        await story.until(lambda: len(story.restarts) == 2)
    story.step = 0.0  # ranks that were ended tell none
    await story.tell(lost(1), STOP)
    await story.until(lambda: "lost" in [row["kind"] for row in story.restarts])
    await story.tell(10.0)
    story.its.close()
    assert story.code is None, "it waits before all leave, since this is the second restart at one step"
    assert story.asked_after(1) == generation + 1
    found = columns(story, "generation", "kind", "step")
    assert found[-2:] == [(generation, "fault", 6), (generation + 1, "lost", 5)]


async def test_signals_of_a_launcher_that_ends_all_after_a_loss_during_a_restart_are_no_request(
    tmp_path: Path,
) -> None:
    story = Story(tmp_path, "lost", backoff_s=5.0, max_restarts=5, checkpoint_read_s=1.0)
    await story.tell(failed(1))
    await story.restarted(2)
    await story.tell(failed(0, 2))
    await story.until(lambda: len(story.lines) == 2)
    await story.tell(lost(1), 0.5, STOP)
    assert messages.Regroup(4) not in story.said, "it still looks for the newest checkpoint"
    assert await story.left() == AGAIN


@pytest.mark.parametrize("ending", [False, True], ids=["a moment later", "while ranks are being ended"])
async def test_a_rank_and_its_supervisor_that_are_lost_are_one_fault(tmp_path: Path, ending: bool) -> None:
    """The kernel may kill both, one after the other, when memory runs out; one restart is allowed."""
    story = begun(tmp_path, "lost", max_restarts=1)
    await story.tell(failed(1))
    if ending:
        await story.heard(messages.Regroup)
        await story.tell(messages.Ended(2, 0))
    await story.tell(lost(1))
    assert await story.left() == AGAIN
    generation = 3 if ending else 2
    told = columns(story, "generation", "cause", "kind", "step", "left_out")
    assert told == [(generation, "killed", "fault", 6, [])]
    assert story.asked_after(1) == generation


async def test_launcher_is_asked_in_the_moment_of_a_loss(tmp_path: Path) -> None:
    """MPI kills all half a second later: neither the decision nor the run folder is waited for."""
    story = begun(tmp_path / "before the decision", "lost")
    await story.tell(failed(1), lost(1))
    await story.until(lambda: story.asked_after(1))
    assert (story.asked_after(1), story.said) == (2, [])
    story.its.close()
    story = begun(tmp_path / "while ranks are being ended", "lost")
    await story.tell(failed(0))
    await story.heard(messages.Regroup)
    story.checkpoint_read_s = 1e3
    await story.tell(lost(1))
    await story.until(lambda: story.asked_after(1))
    assert (story.asked_after(1), story.said) == (3, [messages.Regroup(2)])
    story.its.close()


async def test_coordinator_lost_after_it_has_asked_counts_once(tmp_path: Path) -> None:
    """mpirun may kill it before the others, which then find its request."""
    limits = replace(stub_world.LIMITS, backoff_s=600.0, max_restarts=5)
    world = stub_world.StubWorld(("a", "b", "c"), tmp_path, limits, launcher="CLIPSHIP_STARTS_AGAIN")
    first, _, _ = (world.begin(member).coordinator for member in range(3))
    assert first is not None
    await stub_world.until(lambda: len(first.members) == 3)
    world.fail(1)
    await world.agreed(2, 3)
    await asyncio.sleep(0.3)
    world.lose(2)  # a second fault without a new step: the coordinator waits before it lets all leave
    await stub_world.until(lambda: len(world.restarts()) == 2)
    world.lose(0)
    assert await world.members[1].task == AGAIN
    assert asked_after(tmp_path, world.rendezvous.start, 2) == 3
    assert [row["generation"] for row in world.restarts()] == [2, 3]


async def test_restarts_that_name_no_node_speak_against_none(tmp_path: Path) -> None:
    """After several of them, the next fault of a rank still leaves no node out."""
    for generation in (1, 2, 3):
        story = begun(tmp_path, generation=generation, max_restarts=9)
        await begin_and_ask(story)
        take_word(tmp_path)
        story.its.close()
    story = begun(tmp_path, generation=4, max_restarts=9)
    await story.its.begin()
    await story.tell(done(0, generation=4), done(1, generation=4))
    end = await story.ended()
    assert (end.exit_code, end.left_out) == (0, ())
    assert [restart["node"] for restart in end.restarts] == ["", "", ""]


async def test_ranks_that_have_not_trained_are_not_started_again_if_all_are_killed(tmp_path: Path) -> None:
    story = begun(tmp_path, begun=False)
    await story.its.begin()
    await story.tell(1.0)
    story.its.close()
    assert not story.word


@pytest.mark.parametrize("message", [STOP, done(0)], ids=["stop", "done"])
async def test_a_run_that_is_about_to_end_withdraws_that_request(
    tmp_path: Path, message: messages.Message
) -> None:
    story = begun(tmp_path)
    await begin_and_ask(story)
    await story.tell(message)
    await story.until(lambda: story.word.get("word") != "again-if-killed")
    story.its.close()


@pytest.mark.parametrize("outside", [False, True])
async def test_a_persons_stop_between_generations_counts_where_mpi_signals_all(
    tmp_path: Path, outside: bool
) -> None:
    story = begun(tmp_path)
    await story.tell(failed(1))
    await story.heard(messages.Regroup)
    await story.tell(replace(STOP, outside=outside), messages.Ended(2, 0), messages.Ended(2, 1))
    assert await story.left() == (75 if outside else AGAIN)
    assert messages.Start not in story.kinds


@pytest.mark.parametrize(
    ("asks", "ready", "stopped", "code", "said"),
    [
        ({1: 2, 2: 5, 5: 0}, "", False, 105, []),
        ({1: 2, 2: 0}, "", True, 75, ["asked to stop between two starts"]),
        ({1: 0}, "", True, 101, []),
        ({1: 2}, "no ssh to b", False, 1, ["no restart: no ssh to b"]),
    ],
    ids=[
        "until none is asked for, also if 3 and 4 began without the launcher",
        "a stop that no supervisor could hear",
        "a stop that a supervisor has heard",
        "a generation that cannot start",
    ],
)
def test_generations_are_started_one_after_the_other(
    asks: dict[int, int], ready: str, stopped: bool, code: int, said: list[str]
) -> None:
    started: list[int] = []
    told: list[str] = []

    def start(generation: int) -> int:
        started.append(generation)
        return 100 + generation

    assert run_generations(start, asks.__getitem__, lambda: ready, told.append, lambda: stopped) == code
    assert started == ([1] if code != 105 else [*asks])
    assert [line[: len(each)] for line, each in zip(told, said, strict=True)] == said


def test_clipship_run_starts_mpirun_again_with_the_same_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, str]] = []

    def supervise(command: list[str], env: dict[str, str], exits: Path, *_: object, **__: object) -> int:
        assert not list(exits.glob("rank-*.json"))
        assert command.count("CLIPSHIP_GENERATION") == 1
        generation = int(env["CLIPSHIP_GENERATION"])
        seen.append((env["CLIPSHIP_TOKEN"], env["CLIPSHIP_GENERATION"], env["CLIPSHIP_STARTS_AGAIN"]))
        files = ExitFiles(str(tmp_path), Rendezvous("", 1, env["CLIPSHIP_TOKEN"]).start)
        record = ExitRecord(1, "n", 1, "killed", 1.0, generation=generation + 1)
        if generation < 3:
            (exits / "rank-00001.json").write_text(json.dumps(asdict(record)))
            asyncio.run(files.request_start(launcher_word.StartRequest(record)))
        return AGAIN if generation < 3 else 75

    monkeypatch.setattr(local, "supervise", supervise)
    monkeypatch.setattr(local, "find_open_mpi", lambda: "mpirun")
    job = tiny_job(comm={"backend": "horovod", "launcher": "mpirun"}, recovery={"max_restarts": 3})
    assert local.start_ranks(["true"], job, nproc=2, hosts=None, folder=tmp_path) == 75
    assert [one[1:] for one in seen] == [("1", "always"), ("2", "always"), ("3", "always")]
    assert len({one[0] for one in seen}) == 1
