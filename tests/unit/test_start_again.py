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
from tests.support.stub_supervisor import StubSupervisor, run_state
from tests.unit.test_coordinator_restarts import LIMITS, Story
from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_START_AGAIN
from trainer.launch import local
from trainer.launch.start_again import asked_after, run_generations
from trainer.run.exit_files import ExitFiles, exit_record_of
from trainer.run.exit_record import ExitRecord
from trainer.run.launcher_word import WORD, StartRequest, requested_start
from trainer.run.lock import Holder
from trainer.safe_io.values import read_values
from trainer.supervise.coordinate import coordinator
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.coordinate.membership import Membership
from trainer.supervise.limits import Limits
from trainer.supervise.messages import (
    Done,
    Ended,
    Failed,
    Joined,
    Lost,
    Message,
    Regroup,
    Start,
    Stop,
    StopRequest,
)
from trainer.supervise.restart_history import RestartHistory
from trainer.world.rendezvous import Rendezvous


def begun(folder: Path, *, max_restarts: int = 2, backoff_s: float = 0.0, **of: Any) -> Story:
    """A coordinator of two ranks of one generation, with step 4 in memory."""
    limits = replace(LIMITS, run_folder=str(folder), max_restarts=max_restarts, backoff_s=backoff_s)
    story = Story(**{"limits": limits, "kept": 4, "obedient": False, **of})
    story.begin()
    return story


async def begin_and_ask(story: Story) -> None:
    """Begins its generation, until it has asked for the case that all are killed."""
    await story.its.begin()
    await story.until(lambda: word(Path(story.limits.run_folder)).get("word") == "again-if-killed")


def failed(rank: int, generation: int, cause: str = "killed") -> Failed:
    record = ExitRecord(rank, f"n{rank}", 1, cause, time.time())
    return Failed(generation=generation, waiting=False, step=6, record=record, killed=True)


def lost(rank: int) -> Message:
    return Lost(member=rank, node=f"n{rank}", reason="its connection closed")


def word(folder: Path) -> dict[str, str]:
    """Returns what the supervisors have told their launcher."""
    return read_values(folder / WORD)


def take_word(folder: Path, at: float = 0.0) -> None:
    """Takes the request for the case that all are killed, as the batch script does."""
    with (folder / WORD).open("a") as file:
        file.write(f"word=again\ntime={at or time.time()}\n")


def rows(folder: Path) -> list[dict[str, object]]:
    """Returns the restarts that are recorded; none before the file is there."""
    file = folder / "restarts.json"
    found: list[dict[str, object]] = json.loads(file.read_text())["restarts"] if file.exists() else []
    return found


async def test_after_a_fault_all_supervisors_leave_and_ask_to_be_started_again(tmp_path: Path) -> None:
    story = begun(tmp_path, starts_again="always")
    story.its.receive(failed(1, 1))
    while not story.said:
        await asyncio.sleep(0.01)
    assert story.said == [Regroup(generation=2)]
    for rank in (0, 1):
        story.its.receive(Ended(member=rank, generation=2))
    assert (await story.ended()).exit_code == EXIT_START_AGAIN
    assert asked_after(tmp_path, "now", 1) == 2
    assert asked_after(tmp_path, "now", 2) == 0
    assert asked_after(tmp_path, "another", 1) == 0
    (row,) = rows(tmp_path)
    assert (row["generation"], row["cause"], row["kind"]) == (2, "killed", "fault")
    assert row["from_step"] == 4, "the newest step in memory"
    request = requested_start(tmp_path, "now")
    assert request is not None
    assert (request.steps_done, request.in_memory, request.fault_step) == (5, 4, 6)
    assert not (tmp_path / "exit.json").exists()


async def test_the_next_coordinator_counts_on_and_ends_the_run_for_good(tmp_path: Path) -> None:
    """Two restarts are allowed; the coordinator of each generation is another process.

    New steps in memory do not begin the count anew: only a checkpoint does.
    """

    async def work(generation: int) -> ExitRecord:
        done = 5 * generation
        story = begun(tmp_path, starts_again="always", generation=generation, step=float(done), kept=done - 1)
        if generation > 1:
            await story.its.begin()
        story.its.receive(failed(generation % 2, generation, f"cause {chr(96 + generation)}"))
        return await story.ended()

    codes = [(await work(generation)).exit_code for generation in (1, 2, 3)]
    assert codes == [EXIT_START_AGAIN, EXIT_START_AGAIN, 1]
    end = json.loads((tmp_path / "exit.json").read_text())
    assert end["generation"] == 3
    assert "2 restarts without a new checkpoint" in end["reason"]
    assert [row["generation"] for row in end["restarts"]] == [2, 3]
    assert asked_after(tmp_path, "now", 2) == 0, "the run has ended"


@pytest.mark.parametrize(("in_memory", "from_step"), [(0, 4), (8, 8)])
async def test_a_loss_that_nobody_could_record_is_counted_by_the_next_coordinator(
    in_memory: int, from_step: int, tmp_path: Path
) -> None:
    """Rank 0's supervisor was killed; another one left the request, and may be on the only node of before."""
    record = ExitRecord(0, "n0", EXIT_FAILED, "its supervisor is gone", 1.0, generation=2)
    story = begun(tmp_path, starts_again="lost", generation=2)
    request = StartRequest(record, steps_done=9, in_memory=in_memory)
    await ExitFiles(str(tmp_path), "now").request_start(request)
    await story.its.begin()
    assert not story.records
    (row,) = rows(tmp_path)
    assert (row["generation"], row["node"], row["kind"], row["step"]) == (2, "n0", "lost", 9)
    assert row["from_step"] == from_step
    assert row["seconds"] is None, "step 9 was done before: it is not new"


async def test_same_fault_is_counted_though_mpi_killed_the_coordinators_that_saw_it(tmp_path: Path) -> None:
    async def work(generation: int) -> list[ExitRecord]:
        story = begun(tmp_path, starts_again="always", generation=generation)
        record = ExitRecord(1, "n1", EXIT_FAILED, "killed; and a hint", 1.0, generation=generation)
        await ExitFiles(str(tmp_path), "now").request_start(
            StartRequest(record, steps_done=5, in_memory=4, fault_step=6)
        )
        await story.its.begin()
        await asyncio.sleep(0.1)
        story.its.close()
        return story.records

    assert await work(2) == []
    (row,) = rows(tmp_path)
    assert (row["kind"], row["rank"], row["step"]) == ("fault", 1, 6)
    (end,) = await work(3)
    assert end.exit_code == EXIT_FAILED
    assert "the same fault at the same step 2 times in a row" in end.reason


@pytest.mark.parametrize("moment", ["while ranks are being ended", "during the wait"])
async def test_supervisor_lost_during_a_restart_lets_the_launcher_start_all_again(
    moment: str, tmp_path: Path
) -> None:
    story = begun(tmp_path, starts_again="lost", backoff_s=600.0, max_restarts=4)
    if moment == "during the wait":  # the first restart without a new step does not wait
        story.its.receive(failed(0, 1, "first"))
        await story.until_said(Regroup)
        for rank in (0, 1):
            story.its.receive(Ended(member=rank, generation=2))
        await story.until_said(Start)
        story.said.clear()
    generation = 3 if moment == "during the wait" else 2
    story.its.receive(failed(0, generation - 1))
    await story.until_said(Regroup)
    story.its.receive(Ended(member=0, generation=generation))
    if moment == "during the wait":
        story.its.receive(Ended(member=1, generation=generation))
        while len(rows(tmp_path)) < 2:
            await asyncio.sleep(0.01)
    story.its.receive(lost(1))
    while "lost" not in [row["kind"] for row in rows(tmp_path)]:
        await asyncio.sleep(0.01)
    story.its.close()
    assert not story.records, "it waits before all leave, since this is the second restart at one step"
    assert asked_after(tmp_path, "now", 1) == generation + 1
    kinds = [(row["generation"], row["kind"], row["step"]) for row in rows(tmp_path)]
    assert kinds[-2:] == [(generation, "fault", 6), (generation + 1, "lost", 5)]


async def test_supervisor_lost_a_moment_after_its_rank_lets_the_launcher_start_all_again(
    tmp_path: Path,
) -> None:
    """The kernel may kill both, one after the other, when memory runs out."""
    story = begun(tmp_path, starts_again="lost")
    story.its.receive(failed(1, 1))
    story.its.receive(lost(1))
    assert (await story.ended()).exit_code == EXIT_START_AGAIN
    (row,) = rows(tmp_path)
    assert (row["cause"], row["kind"], row["step"]) == ("killed", "fault", 6)


async def test_rank_and_its_supervisor_lost_while_ranks_are_being_ended_are_one_fault(tmp_path: Path) -> None:
    story = begun(tmp_path, starts_again="lost", max_restarts=1)
    story.its.receive(failed(1, 1))
    await story.until_said(Regroup)
    story.its.receive(Ended(member=0, generation=2))
    story.its.receive(lost(1))
    assert (await story.ended()).exit_code == EXIT_START_AGAIN
    assert story.its._run.membership.excluded == {}
    (row,) = rows(tmp_path)
    assert (row["generation"], row["kind"], row["step"]) == (3, "fault", 6)
    assert asked_after(tmp_path, "now", 1) == 3


@pytest.mark.parametrize("in_memory", [0, 8])
async def test_supervisors_that_were_started_again_let_ranks_save_what_is_in_memory_before_they_stop(
    in_memory: int, tmp_path: Path
) -> None:
    before = begun(tmp_path, starts_again="always", kept=in_memory)
    before.its.receive(failed(1, 1))
    await before.ended()
    story = begun(tmp_path, starts_again="always", generation=2, kept=in_memory, begun=False)
    await story.its.begin()
    story.its.receive(StopRequest(15, 0, "n0"))
    if in_memory:
        await story.until_said(Stop)
        assert not story.records
    else:
        assert (await story.ended()).exit_code == 75


@pytest.mark.parametrize("moment", ["before the decision", "while ranks are being ended"])
async def test_launcher_is_asked_in_the_moment_of_a_loss(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI kills all half a second later."""
    story = begun(tmp_path, starts_again="lost")
    if moment == "before the decision":
        monkeypatch.setattr(coordinator, "SETTLE_S", 1e6)
        story.its.receive(replace(failed(1, 1), killed=False))
    else:
        story.its.receive(failed(0, 1))
        await story.until_said(Regroup)
        monkeypatch.setattr(RestartHistory, "saved_step", never)
    story.its.receive(lost(1))
    while asked_after(tmp_path, "now", 1) == 0:
        await asyncio.sleep(0.01)
    story.its.close()
    assert asked_after(tmp_path, "now", 1) == (2 if moment == "before the decision" else 3)


async def never(_history: RestartHistory) -> int:
    await asyncio.sleep(1e6)
    return 0


async def test_coordinator_lost_after_it_has_asked_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun may kill it before the others, which then find its request."""
    monkeypatch.setattr(stub_world, "KEEPS_GOING", "CLIPSHIP_STARTS_AGAIN")
    limits = replace(stub_world.LIMITS, backoff_s=600.0, max_restarts=5)
    world = stub_world.StubWorld(("a", "b", "c"), tmp_path, limits=limits)
    first, _, _ = (world.begin(member).coordinator for member in range(3))
    assert first is not None
    await stub_world.until(lambda: len(first.members) == 3)
    world.fail(1)
    await world.agreed(2, 3)
    await asyncio.sleep(0.3)
    world.lose(2)  # a second fault without a new step: the coordinator waits before it lets all leave
    await stub_world.until(lambda: len(rows(tmp_path)) == 2)
    world.lose(0)
    assert await world.members[1].task == EXIT_START_AGAIN
    assert asked_after(tmp_path, world.rendezvous.start, 2) == 3
    assert [row["generation"] for row in rows(tmp_path)] == [2, 3]


async def test_all_ranks_killed_at_once_are_counted_by_the_next_coordinator(tmp_path: Path) -> None:
    """Slurm has killed them before anyone could ask; its script then takes the request left beforehand."""

    async def work(generation: int) -> None:
        story = begun(tmp_path, starts_again="always", generation=generation)
        await begin_and_ask(story)
        story.its.close()

    await work(1)
    assert asked_after(tmp_path, "now", 1) == 0, "nobody was killed"
    take_word(tmp_path)
    assert asked_after(tmp_path, "now", 1) == 2
    await work(2)
    (row,) = rows(tmp_path)
    assert (row["generation"], row["node"], row["kind"]) == (2, "", "lost")
    assert (row["step"], row["from_step"]) == (4, 4), "what is in memory was done"
    assert (word(tmp_path)["word"], word(tmp_path)["generation"]) == ("again-if-killed", "3")


async def test_ranks_that_have_not_trained_are_not_started_again_if_all_are_killed(tmp_path: Path) -> None:
    story = begun(tmp_path, starts_again="always", begun=False)
    await story.its.begin()
    await asyncio.sleep(0.2)
    story.its.close()
    assert not word(tmp_path)


@pytest.mark.parametrize("message", [StopRequest(12, 0, "n0"), Done(1, 0, 0)], ids=["stop", "done"])
async def test_a_run_that_is_about_to_end_withdraws_that_request(tmp_path: Path, message: Message) -> None:
    story = begun(tmp_path, starts_again="always")
    await begin_and_ask(story)
    story.its.receive(message)
    while word(tmp_path).get("word") == "again-if-killed":
        await asyncio.sleep(0.01)
    story.its.close()
    assert word(tmp_path).get("word") != "again-if-killed"


async def test_what_another_start_has_asked_for_is_not_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = begun(tmp_path, starts_again="always")
    await begin_and_ask(story)
    another = Holder("n2", start="another")
    monkeypatch.setattr("trainer.run.exit_files.who_holds", lambda folder: another)
    await ExitFiles(str(tmp_path), "now").withdraw_start()
    story.its.close()
    assert word(tmp_path)["word"] == "again-if-killed"


async def test_restarts_that_name_no_node_speak_against_none(tmp_path: Path) -> None:
    """After several of them, the next fault of a rank still leaves no node out."""
    for generation in (1, 2, 3):
        story = begun(tmp_path, starts_again="always", generation=generation, max_restarts=9)
        await begin_and_ask(story)
        take_word(tmp_path)
        story.its.close()
    story = begun(tmp_path, starts_again="always", generation=4, max_restarts=9)
    await story.its.begin()
    for rank in (0, 1):
        story.its.receive(Done(rank=rank, code=0, generation=4))
    end = await story.ended()
    assert (end.exit_code, end.left_out) == (0, ())
    assert [restart["node"] for restart in end.restarts] == ["", "", ""]


@pytest.mark.parametrize("outside", [False, True])
async def test_a_persons_stop_between_generations_counts_where_mpi_signals_all(
    tmp_path: Path, outside: bool
) -> None:
    story = begun(tmp_path, starts_again="always")
    story.its.receive(failed(1, 1))
    await story.until_said(Regroup)
    story.its.receive(StopRequest(signal=15, rank=0, node="n0", outside=outside))
    for rank in (0, 1):
        story.its.receive(Ended(member=rank, generation=2))
    assert (await story.ended()).exit_code == (EXIT_PREEMPTED if outside else EXIT_START_AGAIN)


def test_generations_are_started_until_none_is_asked_for() -> None:
    started: list[int] = []

    def start(generation: int) -> int:
        started.append(generation)
        return 100 + generation

    assert run_generations(start, {1: 2, 2: 5, 5: 0}.__getitem__, lambda: "", print) == 105
    assert started == [1, 2, 5], "3 and 4 began without the launcher"


def test_a_stop_that_no_supervisor_could_hear_ends_the_run_as_one_that_was_stopped() -> None:
    said: list[str] = []
    code = run_generations(lambda _: 143, {1: 2, 2: 0}.__getitem__, lambda: "", said.append, lambda: True)
    assert (code, len(said)) == (EXIT_PREEMPTED, 1)
    assert run_generations(lambda _: 143, {1: 0}.__getitem__, lambda: "", said.append, lambda: True) == 143


def test_a_generation_that_cannot_start_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_generations(lambda _: EXIT_START_AGAIN, lambda _: 2, lambda: "no ssh to b", print)
    assert code == EXIT_FAILED
    assert capsys.readouterr().out == "no restart: no ssh to b\n"


def test_clipship_run_starts_mpirun_again_with_the_same_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, str]] = []

    def supervise(command: list[str], env: dict[str, str], exits: Path, *_: object, **__: object) -> int:
        rendezvous = Rendezvous.from_env(env)
        assert rendezvous is not None
        assert not list(exits.glob("rank-*.json"))
        assert command.count("CLIPSHIP_GENERATION") == 1
        generation = int(env["CLIPSHIP_GENERATION"])
        seen.append((env["CLIPSHIP_TOKEN"], env["CLIPSHIP_GENERATION"], env["CLIPSHIP_STARTS_AGAIN"]))
        files, record = ExitFiles(str(tmp_path), rendezvous.start), ExitRecord(1, "n", 1, "killed", 1.0)
        (exits / "rank-00001.json").write_text(json.dumps(asdict(record)))
        if generation < 3:
            asyncio.run(files.request_start(StartRequest(replace(record, generation=generation + 1))))
            return EXIT_START_AGAIN
        (exits / "rank-00001.json").unlink()
        return EXIT_PREEMPTED

    monkeypatch.setattr(local, "supervise", supervise)
    monkeypatch.setattr(local, "find_open_mpi", lambda: "mpirun")
    job = tiny_job(comm={"backend": "horovod", "launcher": "mpirun"}, recovery={"max_restarts": 3})
    assert local.start_ranks(["true"], job, nproc=2, hosts=None, folder=tmp_path) == EXIT_PREEMPTED
    assert [one[1:] for one in seen] == [("1", "always"), ("2", "always"), ("3", "always")]
    assert len({one[0] for one in seen}) == 1


async def test_the_end_names_the_bad_nodes_also_those_that_nobody_could_replace(tmp_path: Path) -> None:
    """A batch script that queues the job again excludes them."""
    ends: list[ExitRecord] = []
    membership = Membership(range(3), wanted=2, fewest=2)
    its = Coordinator(
        run_state(
            (1, 2),
            Limits(run_folder=str(tmp_path)),
            ExitFiles(str(tmp_path), "now"),
            StubSupervisor(records=ends),
            membership,
            member=1,
        )
    )
    for member in range(3):
        its.receive(Joined(member=member, node=f"n{member}"))
    for node in ("n0", "n2"):
        membership.exclude(node, "condemned", "its network is slow")
    its.receive(failed(0, 1))
    while not ends:
        await asyncio.sleep(0.01)
    told = (tmp_path / WORD).read_text()
    assert "\nleft_out=n0\nleft_out=n2\n" in told, "as the batch script reads it"
    record = exit_record_of(tmp_path, "now")
    assert record is not None
    assert record.left_out == ("n0", "n2")
