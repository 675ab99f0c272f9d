"""Limits that a rank learns from its own durations, and what its heartbeat says of them."""

import asyncio
import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, MachineError, Preempted
from trainer.supervise import main
from trainer.supervise.limits import read_limits
from trainer.supervise.rank import rank_report
from trainer.train.hang_limits import limit_learner
from trainer.world import heartbeat, learned_limits
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

CEILINGS = {"step": 300.0, "data": 240.0, "evaluation": 1800.0}


def taught(durations: list[float], what: str = "step", **how: Any) -> learned_limits.LimitLearner:
    learner = learned_limits.LimitLearner(CEILINGS, **how)
    for seconds in durations:
        learner.record(what, seconds)
    return learner


DURATIONS = {
    "too few": ((learned_limits.FEWEST - 1) * [0.5], 300.0),
    "a fifth of enough": (20 * [0.5], 5 * learned_limits.FLOOR_S),
    "usual": (learned_limits.ENOUGH * [4.0], 24.0),
    "pauses that are usual": (980 * [1.0] + 20 * [9.0], 54.0),
    "rare pauses": (990 * [1.0] + 10 * [9.0], 18.0),
    "one pause of 1,000": (999 * [1.0] + [90.0], learned_limits.FLOOR_S),
    "ceiling": (learned_limits.ENOUGH * [70.0], 300.0),
    "forgotten ones": (1000 * [20.0] + learned_limits.WINDOW * [0.5], learned_limits.FLOOR_S),
}


@pytest.mark.parametrize(("durations", "limit_s"), DURATIONS.values(), ids=DURATIONS)
def test_limit_follows_usual_steps_and_rare_pauses(durations: list[float], limit_s: float) -> None:
    assert taught(durations).limit("step").seconds == limit_s


def test_other_phases_keep_their_configured_limits_and_a_wait_has_its_own() -> None:
    learner = taught(learned_limits.WINDOW * [0.5], "evaluation")
    assert learner.limit("evaluation").seconds == 1800.0
    assert learner.limit("shutdown").seconds == math.inf
    waits = taught(learned_limits.ENOUGH * [10.0])
    for _ in range(learned_limits.ENOUGH):
        waits.record(learned_limits.WAIT, 0.1)
    assert waits.limit(learned_limits.WAIT).seconds == 30.0, "longer than a slowed down step of another rank"


def test_next_generation_believes_the_last_one_after_some_steps() -> None:
    known = {"step": taught(learned_limits.ENOUGH * [4.0]).known("step")}
    before = learned_limits.to_text(known, 4)
    learner = taught((learned_limits.SETTLED - 1) * [0.5], ranks=4, before=before)
    assert not learner.limit("step").learned
    assert learner.known("step").count == learned_limits.ENOUGH + learned_limits.SETTLED - 1, (
        "a fault in these steps forgets nothing"
    )
    learner.record("step", 0.5)
    assert learner.limit("step").seconds == 24.0
    learner.record("step", 5.0)
    assert learner.limit("step").seconds == 30.0, "slower steps of its own count at once"
    other = taught(learned_limits.SETTLED * [0.5], ranks=3, before=before)
    assert not other.limit("step").learned, "a generation of another size learns anew"


def test_generations_of_few_steps_learn_together() -> None:
    text = ""
    for _ in range(4):
        learner = taught((learned_limits.FEWEST - 1) * [0.5], ranks=4, before=text)
        text = learned_limits.to_text({"step": learner.known("step")}, 4)
    assert learner.limit("step").seconds == pytest.approx(
        learned_limits.FLOOR_S * learned_limits.ENOUGH / (4 * (learned_limits.FEWEST - 1))
    )


@pytest.mark.parametrize(
    ("restarts", "asked", "learns"),
    [(0, {}, 0), (3, {}, 1), (3, {"learned": False}, 0), (0, {"learned": True}, 1)],
)
def test_limits_are_learned_where_a_false_alarm_costs_little(
    restarts: int, asked: dict[str, Any], learns: bool
) -> None:
    job = tiny_job(timeouts=asked, recovery={"max_restarts": restarts})
    assert (limit_learner(job, World(0, 1, 0, 1, "n", "x"), {}) is not None) == learns


class Rank:
    """A rank that learns its limits, on a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.memory: mmap.mmap = heartbeat.make(folder)
        self.heartbeat = Heartbeat.open({"CLIPSHIP_RANK_DIR": str(folder)})
        self.heartbeat.limits, self.heartbeat.learner = (
            CEILINGS,
            learned_limits.LimitLearner(CEILINGS, ranks=2),
        )

    def steps(self, first: int, count: int) -> None:
        """Steps of 0.1 s of data, 0.5 s of work and 0.2 s of waiting; ends at the begin of a step."""
        for step in range(first, first + count):
            self.heartbeat.begin_phase("data", step)
            self.now += 0.1
            self.heartbeat.begin_phase("step", step)
            self.now += 0.5
            self.heartbeat.begin_collective("all_gather")
            self.now += 0.2
            self.heartbeat.set_waiting(False)
        self.heartbeat.begin_phase("data", first + count)
        self.now += 0.1
        self.heartbeat.begin_phase("step", first + count)

    @property
    def seen(self) -> heartbeat.RankState:
        return heartbeat.read(self.memory)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """One that has done 150 steps, and is in the next one."""
    its = Rank(tmp_path)
    monkeypatch.setattr("trainer.world.heartbeat.time.monotonic", lambda: its.now)
    its.steps(1, 150)
    return its


def test_wait_in_a_collective_has_a_limit_of_its_own(rank: Rank) -> None:
    rank.heartbeat._limit = learned_limits.Limit(60.0, 300.0)
    rank.heartbeat.begin_collective("all_gather")
    rank.now += 12.5
    assert rank.seen.late_text == (
        "step, step 151, waits in a collective (all_gather) for longer than 12 s, learned from the last 150 "
        "(99 % took at most 0.2 s, 99.9 % 0.2 s), under timeouts.step_s = 300 s"
    )
    assert rank.seen.late
    rank.heartbeat.set_waiting(False)
    assert not rank.seen.late
    rank.heartbeat.begin_phase("checkpoint", 151)
    rank.heartbeat.begin_collective("barrier")
    rank.now += 100
    assert not rank.seen.late, "in other phases the configured limits hold"


def test_suspension_of_the_machine_counts_for_no_limit(rank: Rank) -> None:
    rank.heartbeat.begin_collective("all_gather")
    rank.now += 3600
    assert rank.seen.late
    assert not rank.seen.resumed_after(lambda since: 3600.0).late
    rank.heartbeat.set_waiting(False)
    rank.steps(151, learned_limits.WINDOW - 150)
    assert rank.seen.limit_s == learned_limits.FLOOR_S, "one leaves what was learned"


# The limits of a job as a supervisor reads them, and what it does when they do not come.


def _too_slow(arguments: Sequence[str]) -> dict[str, Any]:
    time.sleep(60.0)
    return {}


def _without_an_answer(arguments: Sequence[str]) -> dict[str, Any]:
    os._exit(9)


def _failing(arguments: Sequence[str]) -> dict[str, Any]:
    raise OSError(5, "Input/output error", "job.toml")


@pytest.mark.parametrize(
    ("read", "wait_s", "reason"),
    [
        (_too_slow, 0.1, r"not read within 0.1 s: start the run again"),
        (_without_an_answer, 60.0, r"ended without an answer \(code 9\)"),
        (_failing, 60.0, r"could not be read: OSError: \[Errno 5\] Input/output error: 'job.toml'"),
    ],
)
def test_limits_that_do_not_come_are_not_replaced_by_others(
    read: Any, wait_s: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.job_limits.limits_of_job", read)
    monkeypatch.setattr("trainer.supervise.limits.READ_S", wait_s)
    with pytest.raises(MachineError, match=reason):
        read_limits(["job.toml"])


def test_a_stop_is_heeded_although_the_job_file_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request comes while the file is waited for."""
    monkeypatch.setattr("trainer.run.job_limits.limits_of_job", _too_slow)
    monkeypatch.setattr("trainer.supervise.limits.ASKED_S", 0.1)
    asked: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _frame: asked.append(number))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        with pytest.raises(Preempted, match="asked to stop before the job file was read"):
            read_limits(["job.toml"], asked)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (Preempted("asked to stop before it was read"), EXIT_PREEMPTED, "asked to stop before it was read"),
        (MachineError("not read: a reason"), EXIT_FAILED, "cannot be started: not read: a reason"),
    ],
)
def test_a_supervisor_without_limits_ends_with_a_sentence(
    problem: Exception,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ends(*_arguments: object, **_keys: object) -> int:
        raise problem

    monkeypatch.setattr(main, "supervise", ends)
    monkeypatch.setenv("CLIPSHIP_BEGAN", "1.0")  # else it stays set
    assert main.main(["job.toml"]) == code
    assert said in capsys.readouterr().err


def test_ras_is_asked_and_its_answer_kept() -> None:
    async def story() -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"asked: " + await reader.readline())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        found = await rank_report.ras_status(server.sockets[0].getsockname())
        server.close()
        return found

    assert asyncio.run(story()) == "asked: verbose status\n"
    assert asyncio.run(rank_report.ras_status(("127.0.0.1", 1))) == ""


def test_flight_record_is_asked_for_and_kept(tmp_path: Path) -> None:
    assert asyncio.run(rank_report.flight_record(tmp_path, tmp_path / "kept")) is None
    pipe = tmp_path / "nccl-pipe-3.pipe"
    os.mkfifo(pipe)
    listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "nccl-dump-3").write_bytes(b"record")
    kept = asyncio.run(rank_report.flight_record(tmp_path, tmp_path / "kept"))
    assert os.read(listener, 10) == b"1\n"
    os.close(listener)
    assert kept is not None
    assert kept.read_bytes() == b"record"
