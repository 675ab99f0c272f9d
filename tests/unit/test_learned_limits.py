"""Limits that a rank learns from its own durations, and what its heartbeat says of them."""

import math
import mmap
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hang
from benchmarks.hang_world import simulate
from tests.support.jobs import tiny_job
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


def test_configured_limit_holds_until_enough_is_known() -> None:
    almost = taught((learned_limits.FEWEST - 1) * [0.5]).limit("step")
    assert (almost.seconds, almost.learned) == (300.0, False)
    few = taught(20 * [0.5]).limit("step")
    assert (few.seconds, few.learned) == (5 * learned_limits.FLOOR_S, True), "a fifth of enough"
    enough = taught(learned_limits.ENOUGH * [0.5]).limit("step")
    assert (enough.seconds, enough.learned, enough.ceiling_s) == (learned_limits.FLOOR_S, True, 300.0)
    # A run that writes a record every 200 steps has long ones among 600.
    assert [taught(steps * [0.5], period=200).limit("step").learned for steps in (599, 600)] == [False, True]


DURATIONS = {
    "usual": (learned_limits.ENOUGH * [4.0], 24.0),
    "rare pauses": (990 * [1.0] + 10 * [9.0], 18.0),
    "pauses that are usual": (980 * [1.0] + 20 * [9.0], 54.0),
    "one pause of 1,000": (999 * [1.0] + [90.0], learned_limits.FLOOR_S),
    "ceiling": (learned_limits.ENOUGH * [70.0], 300.0),
    "slow ones": (learned_limits.WINDOW * [20.0], 120.0),
    "forgotten ones": (
        learned_limits.WINDOW * [20.0] + learned_limits.WINDOW * [0.5],
        learned_limits.FLOOR_S,
    ),
}


@pytest.mark.parametrize(("durations", "limit_s"), DURATIONS.values(), ids=DURATIONS)
def test_limit_follows_usual_steps_and_rare_pauses(durations: list[float], limit_s: float) -> None:
    assert taught(durations).limit("step").seconds == limit_s


def test_percentiles_are_those_of_the_last_durations() -> None:
    draw = random.Random(0)
    values = [draw.expovariate(1) for _ in range(3000)]
    basis = taught(values).basis("step")
    last = sorted(values[-learned_limits.WINDOW :])
    assert (basis.count, basis.p99_s, basis.p999_s) == (learned_limits.WINDOW, last[989], last[998])


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
    learner = taught((learned_limits.SETTLED - 1) * [0.5], ranks=4, before=learned_limits.to_text(known, 4))
    assert not learner.limit("step").learned
    assert learner.known("step").count == learned_limits.ENOUGH + learned_limits.SETTLED - 1, (
        "a fault in these steps forgets nothing"
    )
    learner.record("step", 0.5)
    assert learner.limit("step").seconds == 24.0
    learner.record("step", 5.0)
    assert learner.limit("step").seconds == 30.0, "slower steps of its own count at once"
    other = taught(learned_limits.SETTLED * [0.5], ranks=3, before=learned_limits.to_text(known, 4))
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


def test_late_rank_says_that_its_limit_was_learned_and_from_what(rank: Rank) -> None:
    state = rank.seen
    assert (state.limit_s, state.ceiling_s, state.wait_limit_s) == (
        learned_limits.FLOOR_S,
        300.0,
        learned_limits.FLOOR_S,
    )
    assert (state.late, state.ranks) == (False, 2)
    following = taught(
        learned_limits.SETTLED * [0.7], ranks=2, before=learned_limits.to_text(state.learned, state.ranks)
    )
    assert following.limit("step").learned, "the supervisor tells the next generation"
    rank.now += 12.5
    assert rank.seen.late_text == (
        "step, step 151, lasts longer than 12 s, learned from the last 150 (99 % took at most 0.7 s, "
        "99.9 % 0.7 s), under timeouts.step_s = 300 s"
    )
    assert rank.seen.late


def test_wait_in_a_collective_has_a_limit_of_its_own(rank: Rank) -> None:
    rank.heartbeat._limit = learned_limits.Limit(60.0, 300.0)
    rank.heartbeat.begin_collective("all_gather")
    rank.now += 12.5
    assert rank.seen.late_text.startswith(
        "step, step 151, waits in a collective (all_gather) for longer than 12 s, learned from the last 150 ("
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


def test_unusual_work_gets_the_configured_limit_and_teaches_nothing(rank: Rank) -> None:
    rank.heartbeat.use_configured_limit()
    assert (rank.seen.limit_s, rank.seen.wait_limit_s) == (300.0, math.inf)
    rank.now += 200
    rank.steps(152, 1)
    assert rank.seen.limit_s == learned_limits.FLOOR_S


# The benchmark of hangs.


def test_simulated_runs_have_no_false_alarm_and_name_the_stopped_rank() -> None:
    outcomes = {
        kind: simulate(hang.SYNTHETIC[kind], ranks=3, steps=1500, stops=10, seed=1)
        for kind in ("steady", "with_records", "slow")
    }
    (path,) = list(hang.RECORDED.glob("digits.json"))
    assert simulate(hang.recorded(path), ranks=4, steps=700, stops=4, seed=0).false_alarms == 0
    for outcome in outcomes.values():
        assert (outcome.false_alarms, outcome.wrong, outcome.not_learned) == (0, 0, 0)
        for seconds, limit in zip(outcome.named_s, outcome.limit_s, strict=True):
            assert seconds <= max(hang.NAMED_S, limit + 1.0)
    report = hang.summary(outcomes)
    assert list(report["beyond_15_s"]) == ["slow"]  # type: ignore[call-overload]
    told = {kind: "NOT within 15 s" in hang.line(kind, outcome, 1.0) for kind, outcome in outcomes.items()}
    assert told == {"steady": False, "with_records": False, "slow": True}


def test_simulation_finds_limits_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLOOR_S", "P99_FACTOR", "P999_FACTOR"):
        monkeypatch.setattr(learned_limits, name, 1.0)
    outcome = simulate(hang.SYNTHETIC["steady"], ranks=3, steps=1500, stops=10, seed=1)
    assert outcome.false_alarms > 0
