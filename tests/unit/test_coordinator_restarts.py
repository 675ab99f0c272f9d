"""Decisions of rank 0's supervisor after a fault when `[recovery]` allows restarts, told by messages."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.stub_supervisor import StubSupervisor, run_state
from trainer.errors import EXIT_START_AGAIN
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate import coordinator as module
from trainer.supervise.coordinate import recovery
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.coordinate.membership import Membership
from trainer.supervise.coordinate.states import State
from trainer.supervise.limits import Limits
from trainer.supervise.messages import (
    Cut,
    Done,
    Ended,
    Failed,
    Joined,
    Late,
    Lost,
    Meet,
    Meeting,
    Message,
    Progress,
    Regroup,
    Start,
    Stop,
    StopRequest,
)

LIMITS = Limits(checkpoint_s=60.0, shutdown_s=60.0, max_restarts=2, backoff_s=0.0)
START = {"MASTER_PORT": "4711"}


@dataclass
class Story(StubSupervisor):
    """A coordinator of two members, and all that it has said."""

    limits: Limits = LIMITS
    step: float = 5.0
    has_tree: bool = True
    obedient: bool = True
    """Every supervisor confirms at once that its rank has ended."""
    no_port: bool = False
    keeps_going: bool = False
    starts_again: str = ""
    generation: int = 1
    ranks: int = 2
    fewest: int = 0

    def begin(self) -> Coordinator:
        self.its = Coordinator(
            run_state(
                range(self.ranks),
                self.limits,
                ExitFiles(self.limits.run_folder, "now"),
                self,
                Membership(range(2), self.ranks, self.fewest or self.ranks, (self.fewest, self.ranks)),
                keeps_going=self.keeps_going,
                starts_again=self.starts_again,
                generation=self.generation,
            )
        )
        for rank in (0, 1):
            self.its.receive(Joined(rank, f"n{rank}"))
        return self.its

    def broadcast(self, message: Message) -> None:
        super().broadcast(message)
        if isinstance(message, Regroup) and self.obedient:
            for rank in (0, 1):
                self.its.receive(Ended(message.generation, rank))

    async def choose_meeting(self) -> Mapping[str, str]:
        if self.no_port:
            raise OSError("no free port")
        return START

    def kinds(self) -> list[type[Message]]:
        return [type(message) for message in self.said]

    async def until(self, arrived: Callable[[], object]) -> None:
        while not arrived():
            await asyncio.sleep(0.01)

    async def until_said(self, kind: type[Message]) -> None:
        await self.until(lambda: kind in self.kinds())

    async def regrouped(self, generation: int) -> None:
        await self.until(lambda: Regroup(generation) in self.said)

    async def restarted(self, generation: int) -> None:
        start = Start(generation=generation, variables=START)
        await self.until(lambda: start in self.said or self.records)
        assert not self.records

    async def ended(self) -> ExitRecord:
        await self.until(lambda: self.records)
        return self.records[0]


def failed(rank: int, generation: int = 1, *, code: int = 1, step: int = 6, cause: str = "killed") -> Failed:
    record = ExitRecord(rank, f"n{rank}", code, f"{cause}; and a hint", 1.0, "a trace")
    return Failed(generation=generation, waiting=False, step=step, record=record)


def checkpoint(folder: Path, step: int) -> None:
    whole = folder / "checkpoints" / f"step-{step:08d}"
    whole.mkdir(parents=True)
    (whole / "manifest.json").touch()


def begun(story: Story) -> tuple[Story, Coordinator]:
    return story, story.begin()


async def test_ranks_are_ended_first_and_started_when_all_have_ended(tmp_path: Path) -> None:
    checkpoint(tmp_path, 4)
    (tmp_path / "checkpoints" / "step-00000009").mkdir()  # not whole
    story, its = begun(Story(limits=replace(LIMITS, run_folder=str(tmp_path)), obedient=False))
    its.receive(failed(1))
    await story.until_said(Regroup)
    await asyncio.sleep(0.2)
    its.receive(Ended(member=1, generation=2))
    await asyncio.sleep(0.2)
    assert story.kinds() == [Regroup], "rank 0 still lives"
    its.receive(Ended(member=0, generation=2))
    await story.restarted(2)
    assert story.lines == ["clipship: rank 1 on n1: killed; restart 1 of 2: all ranks go on from step 4"]
    record = json.loads((tmp_path / "restarts.json").read_text())["restarts"]
    assert 0 <= time.time() - record[0].pop("time") < 60
    assert record == [
        {
            "generation": 2,
            "cause": "killed",
            "rank": 1,
            "node": "n1",
            "step": 6,
            "from_step": 4,
            "seconds": None,
            "details": "a trace",
            "parts": {},
            "kind": "fault",
            "ranks": 2,
            "left_out": [],
            "saved_step": 4,
            "new_step": True,
        }
    ]
    assert not (tmp_path / "exit.json").exists()
    story.step = 6.0
    for rank in (0, 1):
        its.receive(Done(rank=rank, code=0, generation=2))
    end = await story.ended()
    assert end.exit_code == 0
    (restart,) = json.loads((tmp_path / "exit.json").read_text())["restarts"]
    assert restart["seconds"] > 0
    assert "details" not in restart


async def test_messages_about_ranks_of_an_earlier_generation_are_dropped() -> None:
    story, its = begun(Story())
    its.receive(failed(1))
    await story.restarted(2)
    its.receive(failed(0))
    its.receive(Late(what="old", generation=1))
    its.receive(Done(rank=0, code=0, generation=1))
    await asyncio.sleep(module.SETTLE_S + 0.3)
    assert story.kinds() == [Regroup, Start]
    assert not story.records


async def test_lines_about_a_fault_after_a_restart_name_its_generation(tmp_path: Path) -> None:
    story, its = begun(Story(limits=replace(LIMITS, run_folder=str(tmp_path))))
    its.receive(failed(1))
    await story.restarted(2)
    its.receive(failed(0, 2))
    await story.restarted(3)
    assert story.lines[0].startswith("clipship: rank 1 on n1: killed; restart 1 of 2: ")
    assert story.lines[1].startswith("clipship: rank 0 on n0, generation 2: killed; restart 2 of 2")
    its.receive(failed(1, 3))
    end = await story.ended()
    assert end.headline().startswith(
        "clipship: rank 1 on n1, generation 3, ended the run with exit code 1: killed; "
    )
    assert json.loads((tmp_path / "exit.json").read_text())["generation"] == 3


@pytest.mark.parametrize(
    ("story", "message"),
    [
        (Story(limits=replace(LIMITS, max_restarts=0)), failed(1)),
        (Story(), failed(1, code=2)),
        (Story(begun=False), failed(1)),
        (Story(), Lost(member=1, node="n1", reason="its connection closed")),
        (Story(), Cut(member=1, node="n1", other="rank 0 on n0")),
    ],
    ids=["no restarts", "bad input", "nothing done yet", "lost supervisor", "cut off"],
)
async def test_what_no_restart_helps_against_ends_the_run(story: Story, message: Message) -> None:
    story, its = begun(story)
    its.receive(message)
    end = await story.ended()
    assert (end.rank, end.exit_code) == (
        1,
        message.record.exit_code if isinstance(message, Failed) else 1,
    )
    assert "restart" not in end.reason
    assert story.kinds() == []


@pytest.mark.parametrize(("saving", "code"), [(False, 75), (True, 1)])
async def test_fault_in_the_work_of_a_rank_that_was_asked_to_stop_meanwhile_loses_nothing(
    saving: bool, code: int
) -> None:
    """A loader process that dies is noticed after seconds, and the request comes before."""
    story, its = begun(Story())
    its.receive(StopRequest(signal=15, rank=0, node="n0"))
    record = ExitRecord(1, "n1", 1, "a loader process died", 1.0)
    failed = Failed(record=record, step=7, waiting=False, saving=saving, generation=1)
    its.receive(failed)
    end = await story.ended()
    assert (end.exit_code, end.rank) == (code, 1)
    assert end.reason.startswith("asked to stop; then a loader process died") is (code == 75)


@pytest.mark.parametrize(("saved", "keeps_going"), [(False, True), (True, True), (True, False)])
async def test_loss_after_a_request_to_stop_ends_the_run_as_one_that_can_go_on(
    saved: bool, keeps_going: bool
) -> None:
    story, its = begun(Story(keeps_going=keeps_going))
    its.receive(StopRequest(signal=15, rank=0, node="n0"))
    if saved:
        its.receive(Done(rank=0, code=75, reason="asked to stop", generation=1))
    its.receive(Lost(member=1, node="n1", reason="gone"))
    end = await story.ended()
    assert (end.exit_code, end.rank) == (75, 1)
    assert end.reason.startswith("asked to stop; then its supervisor is gone")


@pytest.mark.parametrize("again", [False, True])
async def test_signals_of_a_launcher_that_ends_all_after_a_failure_are_no_second_request(again: bool) -> None:
    """MPI signals all others when one has failed, long after the request to stop."""
    story, its = begun(Story(starts_again="always"))
    its.receive(StopRequest(signal=12, rank=0, node="n0"))
    await asyncio.sleep(10.0)
    its.receive(replace(failed(1), saving=False))
    its.receive(StopRequest(signal=15, rank=0, node="n0", again=again))
    end = await story.ended()
    assert (end.exit_code, end.rank) == (75, 1)


async def test_signals_of_a_launcher_that_ends_all_after_a_loss_during_a_restart_are_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read_slowly(files: ExitFiles) -> int:
        await asyncio.sleep(1.0)
        return 0

    monkeypatch.setattr(ExitFiles, "newest_checkpoint", read_slowly)
    story, its = begun(Story(limits=replace(LIMITS, backoff_s=5.0, max_restarts=5), starts_again="lost"))
    its.receive(failed(1))
    await story.restarted(2)
    its.receive(failed(0, 2))
    await story.until(lambda: len(story.lines) == 2)
    its.receive(Lost(member=1, node="n1", reason="gone"))
    await story.until(lambda: its.state is State.DECIDING)
    its.receive(StopRequest(signal=15, rank=0, node="n0"))
    assert (await story.ended()).exit_code == EXIT_START_AGAIN


async def test_run_goes_on_without_a_supervisor_that_has_never_joined() -> None:
    """A rank hangs, since it waits for one whose supervisor may still come until init_s."""
    story, its = begun(Story(ranks=3, keeps_going=True, fewest=2))
    its.receive(Late(what="step, step 7 lasts longer than 12 s", generation=1))
    await story.until_said(Regroup)
    its.receive(Ended(member=2, generation=2))  # its own `Joined` is still on its way
    await story.until(lambda: Start in story.kinds() or story.records)
    (start,) = (message for message in story.said if isinstance(message, Start))
    assert start.world == "0 0 n0\n1 1 n1"


@pytest.mark.parametrize("kept", [0, 4, 8])
async def test_stop_while_ranks_start_again_waits_only_if_memory_has_more_than_the_checkpoint(
    kept: int, tmp_path: Path
) -> None:
    """Ranks may take minutes to their first step, with nothing to save."""
    checkpoint(tmp_path, 4)
    story, its = begun(Story(limits=replace(LIMITS, run_folder=str(tmp_path)), obedient=False))
    its.receive(failed(1))
    await story.until_said(Regroup)
    for rank in (0, 1):
        its.receive(Ended(2, rank, in_memory=kept))
    await story.restarted(2)
    story.begun = False  # they read their state from memory
    its.receive(StopRequest(signal=15, rank=0, node="n0"))
    await asyncio.sleep(0.2)
    assert (Stop in story.kinds()) is (not story.records) is (kept == 8)
    for rank in (0, 1):
        its.receive(Done(rank=rank, code=75, reason="asked to stop: step 8 is saved", generation=2))
    end = await story.ended()
    assert (end.exit_code, end.reason == "asked to stop: step 8 is saved") == (75, kept == 8)


async def test_stop_during_the_wait_before_a_restart_leaves_with_75() -> None:
    story, its = begun(Story(limits=replace(LIMITS, backoff_s=600.0)))
    its.receive(failed(1))
    await story.restarted(2)
    its.receive(failed(0, 2))
    await story.until(lambda: len(story.lines) == 2)
    assert "restart 2 of 2 in " in story.lines[1]
    its.receive(StopRequest(signal=15, rank=0, node="n0"))
    assert (await story.ended()).exit_code == 75


async def test_supervisor_that_is_lost_while_ranks_are_being_ended_ends_the_run() -> None:
    story, its = begun(Story(obedient=False))
    its.receive(failed(0))
    await story.until_said(Regroup)
    its.receive(Lost(member=1, node="n1", reason="it has been silent for 6 s"))
    end = await story.ended()
    assert (end.rank, end.exit_code) == (1, 1)
    assert "its supervisor is gone" in end.reason


async def test_rank_that_does_not_end_ends_the_run_with_the_first_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "REGROUP_S", 0.3)
    story, its = begun(Story(obedient=False))
    its.receive(failed(1, code=7))
    await story.until_said(Regroup)
    its.receive(Ended(member=1, generation=2))
    end = await story.ended()
    assert (end.rank, end.exit_code) == (1, 7)
    assert end.reason == "killed; and a hint; no restart, since rank 0 did not end in 0.3 s"


async def test_ranks_that_cannot_meet_again_end_the_run_with_the_first_cause() -> None:
    story, its = begun(Story(no_port=True))
    its.receive(failed(1))
    end = await story.ended()
    assert "no restart, since the ranks cannot meet again: no free port" in end.reason


async def test_restart_counts_seconds_until_a_step_that_no_generation_had_done(tmp_path: Path) -> None:
    def restart() -> Any:
        return json.loads((tmp_path / "restarts.json").read_text())["restarts"][-1]

    def seconds() -> Any:
        return restart()["seconds"]

    story, its = begun(Story(limits=replace(LIMITS, run_folder=str(tmp_path))))
    its.receive(failed(1))
    await story.restarted(2)
    story.step = 5.0
    await asyncio.sleep(0.4)
    assert seconds() is None, "step 5 was done before"
    story.reached = {"connected": time.monotonic(), "stepped": time.monotonic()}
    story.step = 6.0
    await story.until(seconds)
    parts = restart()["parts"]
    assert [*parts] == ["detect", "end", "agree", "connect", "first_step", "redone"]
    assert parts["detect"] >= module.SETTLE_S - 0.01
    assert parts["connect"] >= 0.39, "from the message that starts the ranks"
    assert seconds() == round(sum(parts.values()), 1)


async def test_ranks_that_leave_for_a_planned_restart_count_as_no_step(tmp_path: Path) -> None:
    story, its = begun(Story(limits=replace(LIMITS, run_folder=str(tmp_path))))
    story.step = float("inf")
    its.receive(failed(1))
    await story.restarted(2)
    story.step = 6.0
    await story.until(lambda: '"redone"' in (tmp_path / "restarts.json").read_text())


async def test_parts_of_a_restart_come_from_rank_0_where_the_coordinator_does_not_have_it(
    tmp_path: Path,
) -> None:
    story, its = begun(Story(limits=replace(LIMITS, run_folder=str(tmp_path))))
    its.receive(failed(1))
    await story.restarted(2)
    await asyncio.sleep(0.4)
    ages = {"connected": 0.2, "stepped": 0.0}
    its.receive(Progress(generation=2, steps_done=6, begun=True, ages=ages))
    await story.until(lambda: '"redone"' in (tmp_path / "restarts.json").read_text())
    parts = json.loads((tmp_path / "restarts.json").read_text())["restarts"][-1]["parts"]
    assert [*parts] == ["detect", "end", "agree", "connect", "first_step", "redone"]
    assert parts["first_step"] == pytest.approx(0.2, abs=0.02)


async def lose_twice(story: Story, its: Coordinator, *steps: int, joined: bool = False) -> Start:
    """A fault of rank 0 in each generation; returns the message that starts the last one.

    `steps` are those that node n0 has in memory each time; with `joined` it says so as it comes back.
    """
    for generation, step in enumerate(steps, 2):
        its.receive(failed(0, generation - 1, step=step + 1))
        await story.regrouped(generation)
        its.receive(
            Joined(0, "n0", idle=True, in_memory=step) if joined else Ended(generation, 0, in_memory=step)
        )
        its.receive(Ended(member=1, generation=generation, in_memory=0))
        await story.until(lambda: story.kinds()[-1] in (Start, Meet))
        if story.kinds()[-1] == Meet:
            its.receive(Meeting(generation=generation, variables=START))
        await story.until(lambda: story.kinds()[-1] == Start)
    start = story.said[-1]
    assert isinstance(start, Start)
    return start


def with_a_spare(tmp_path: Path, saved: int) -> Story:
    """A run of one rank, on n0, with a spare on n1, and a checkpoint of step `saved`, or none."""
    if saved:
        checkpoint(tmp_path, saved)
    limits = replace(LIMITS, run_folder=str(tmp_path), max_restarts=9)
    return Story(limits=limits, obedient=False, keeps_going=True, ranks=1)


OUT_OF_REACH = "clipship: step 5 is only in the memory of n0, which has no rank now: "


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("saved", "where", "told"),
    [
        (5, "go on from step 5", None),
        (4, "go on from step 4", OUT_OF_REACH + "the newest checkpoint, step 4, serves"),
        (0, "start again from the beginning", OUT_OF_REACH + "there is no checkpoint"),
    ],
)
async def test_checkpoint_serves_if_only_a_node_without_a_rank_has_a_newer_step(
    tmp_path: Path, saved: int, where: str, told: str | None, joined: bool
) -> None:
    """Node n0 has failed twice, so that n1, which was a spare, has the only rank of the third generation."""
    story, its = begun(with_a_spare(tmp_path, saved))
    start = await lose_twice(story, its, 3, 5, joined=joined)
    assert start.world == "1 1 n1"
    line = next(line for line in story.lines if "restart 2 of 9" in line)
    assert line.endswith(f"all ranks {where}; without node n0: it has failed 2 times")
    assert [line for line in story.lines if "only in the memory" in line] == ([told] if told else [])


@pytest.mark.parametrize(("keeps_going", "cause"), [(True, "its supervisor is gone"), (False, "reset")])
async def test_lost_supervisor_comes_first_unless_the_launcher_ends_all_after_a_failure(
    keeps_going: bool, cause: str
) -> None:
    story, its = begun(Story(keeps_going=keeps_going))
    its.receive(failed(0, cause="connection reset"))
    its.receive(Lost(member=1, node="n1", reason="its connection closed"))
    await story.until(lambda: story.lines or story.records)
    assert cause in [*story.lines, *(record.reason for record in story.records)][0]
