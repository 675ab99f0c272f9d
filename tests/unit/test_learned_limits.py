"""Limits that a rank learns from its own durations, and what its heartbeat says of them."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hang
from benchmarks.hang_world import simulate
from tests.support.jobs import tiny_job
from trainer.run.exit_record import RANK_DIR
from trainer.train.hang_limits import limit_learner
from trainer.world import heartbeat, learned_limits
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World
from trainer.world.learned_limits import (
    ENOUGH,
    FEWEST,
    FLOOR_S,
    SETTLED,
    WAIT,
    WINDOW,
    LimitLearner,
    to_text,
)
from trainer.world.restart_policy import Fault

CEILINGS = {"step": 300.0, "data": 240.0, "evaluation": 1800.0}


def taught(durations: list[float], what: str = "step", **how: Any) -> LimitLearner:
    learner = LimitLearner(CEILINGS, **how)
    for seconds in durations:
        learner.record(what, seconds)
    return learner


def test_configured_limit_holds_until_enough_is_known() -> None:
    almost = taught((FEWEST - 1) * [0.5]).limit("step")
    assert (almost.seconds, almost.learned) == (300.0, False)
    few = taught(20 * [0.5]).limit("step")
    assert (few.seconds, few.learned) == (5 * FLOOR_S, True), "a fifth of enough"
    enough = taught(ENOUGH * [0.5]).limit("step")
    assert (enough.seconds, enough.learned, enough.ceiling_s) == (FLOOR_S, True, 300.0)


def test_steps_that_rarely_do_more_must_have_come_several_times() -> None:
    """A run that writes a record every 200 steps has long ones among 600."""
    assert not taught(599 * [0.5], period=200).limit("step").learned
    assert taught(600 * [0.5], period=200).limit("step").learned


@pytest.mark.parametrize(
    ("durations", "limit_s"),
    [
        (ENOUGH * [4.0], 24.0),
        (990 * [1.0] + 10 * [9.0], 18.0),
        (980 * [1.0] + 20 * [9.0], 54.0),
        (999 * [1.0] + [90.0], FLOOR_S),
        (ENOUGH * [70.0], 300.0),
    ],
    ids=["usual", "rare pauses", "pauses that are usual", "one pause of 1,000", "ceiling"],
)
def test_limit_follows_usual_steps_and_rare_pauses(durations: list[float], limit_s: float) -> None:
    assert taught(durations).limit("step").seconds == limit_s


def test_old_durations_are_forgotten() -> None:
    learner = taught(WINDOW * [20.0])
    assert learner.limit("step").seconds == 120.0
    for _ in range(WINDOW):
        learner.record("step", 0.5)
    assert learner.limit("step").seconds == FLOOR_S


def test_percentiles_are_those_of_the_last_durations() -> None:
    draw = random.Random(0)
    values = [draw.expovariate(1) for _ in range(3000)]
    basis = taught(values).basis("step")
    last = sorted(values[-WINDOW:])
    assert (basis.count, basis.p99_s, basis.p999_s) == (WINDOW, last[989], last[998])


def test_other_phases_keep_their_configured_limits() -> None:
    learner = taught(WINDOW * [0.5], "evaluation")
    assert learner.limit("evaluation").seconds == 1800.0
    assert learner.limit("shutdown").seconds == math.inf


def test_wait_is_longer_than_a_slowed_down_step_of_another_rank() -> None:
    learner = taught(ENOUGH * [10.0])
    for _ in range(ENOUGH):
        learner.record(WAIT, 0.1)
    assert learner.limit(WAIT).seconds == 30.0


def test_next_generation_believes_the_last_one_after_some_steps() -> None:
    known = {"step": taught(ENOUGH * [4.0]).known("step")}
    learner = taught((SETTLED - 1) * [0.5], ranks=4, before=to_text(known, 4))
    assert not learner.limit("step").learned
    assert learner.known("step").count == ENOUGH + SETTLED - 1, "a fault in these steps forgets nothing"
    learner.record("step", 0.5)
    assert learner.limit("step").seconds == 24.0
    learner.record("step", 5.0)
    assert learner.limit("step").seconds == 30.0, "slower steps of its own count at once"


def test_generations_of_few_steps_learn_together() -> None:
    text = ""
    for _ in range(4):
        learner = taught((FEWEST - 1) * [0.5], ranks=4, before=text)
        text = to_text({"step": learner.known("step")}, 4)
    assert learner.limit("step").seconds == pytest.approx(FLOOR_S * ENOUGH / (4 * (FEWEST - 1)))


def test_generation_of_another_size_learns_anew() -> None:
    text = to_text({"step": taught(ENOUGH * [4.0]).basis("step")}, 4)
    assert not taught(SETTLED * [0.5], ranks=3, before=text).limit("step").learned
    assert not taught(SETTLED * [0.5], ranks=4, before="").limit("step").learned


@pytest.mark.parametrize(
    ("restarts", "asked", "learns"),
    [(0, {}, 0), (3, {}, 1), (3, {"learned": False}, 0), (0, {"learned": True}, 1)],
)
def test_limits_are_learned_where_a_false_alarm_costs_little(
    restarts: int, asked: dict[str, Any], learns: bool
) -> None:
    job = tiny_job(timeouts=asked, recovery={"max_restarts": restarts})
    assert (limit_learner(job, World(0, 1, 0, 1, "n", "x"), {}) is not None) == learns


class Clock:
    """Clock of a rank's heartbeat that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("trainer.world.heartbeat.time.monotonic", lambda: self.now)


def steps(rank: Heartbeat, clock: Clock, first: int, count: int) -> None:
    """Steps of 0.1 s of data, 0.5 s of work and 0.2 s of waiting; ends at the begin of a step."""
    for step in range(first, first + count):
        rank.begin_phase("data", step)
        clock.now += 0.1
        rank.begin_phase("step", step)
        clock.now += 0.5
        rank.begin_collective("all_gather")
        clock.now += 0.2
        rank.set_waiting(False)
    rank.begin_phase("data", first + count)
    clock.now += 0.1
    rank.begin_phase("step", first + count)


@pytest.fixture
def rank(tmp_path: Path, clock: Clock) -> Heartbeat:
    memory = heartbeat.make(tmp_path)
    made = Heartbeat.open({RANK_DIR: str(tmp_path)})
    made.limits, made.learner = CEILINGS, LimitLearner(CEILINGS, ranks=2)
    made.supervisors_view = memory  # type: ignore[attr-defined]
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def seen(rank: Heartbeat) -> heartbeat.RankState:
    return heartbeat.read(rank.supervisors_view)  # type: ignore[attr-defined]


def test_late_rank_says_that_its_limit_was_learned_and_from_what(rank: Heartbeat, clock: Clock) -> None:
    steps(rank, clock, 1, 150)
    state = seen(rank)
    assert (state.limit_s, state.ceiling_s, state.wait_limit_s, state.late) == (
        FLOOR_S,
        300.0,
        FLOOR_S,
        False,
    )
    clock.now += 12.5
    assert seen(rank).late_text == (
        "step, step 151, lasts longer than 12 s, learned from the last 150 (99 % took at most 0.7 s, "
        "99.9 % 0.7 s), under timeouts.step_s = 300 s"
    )
    assert seen(rank).late


def test_wait_in_a_collective_has_a_limit_of_its_own(rank: Heartbeat, clock: Clock) -> None:
    steps(rank, clock, 1, 150)
    rank.limits = {**CEILINGS, "step": 300.0}
    rank._limit = learned_limits.Limit(60.0, 300.0)
    rank.begin_collective("all_gather")
    clock.now += 12.5
    assert seen(rank).late_text.startswith(
        "step, step 151, waits in a collective (all_gather) for longer than 12 s, learned from the last 150 ("
    )
    assert seen(rank).late
    rank.set_waiting(False)
    assert not seen(rank).late
    rank.begin_phase("checkpoint", 151)
    rank.begin_collective("barrier")
    clock.now += 100
    assert not seen(rank).late, "in other phases the configured limits hold"


def test_suspension_of_the_machine_counts_for_no_limit(rank: Heartbeat, clock: Clock) -> None:
    steps(rank, clock, 1, 150)
    rank.begin_collective("all_gather")
    clock.now += 3600
    assert seen(rank).late
    assert not seen(rank).resumed_after(lambda since: 3600.0).late


def test_one_suspension_leaves_what_was_learned(rank: Heartbeat, clock: Clock) -> None:
    steps(rank, clock, 1, WINDOW)
    clock.now += 3600
    steps(rank, clock, WINDOW + 1, 1)
    assert seen(rank).limit_s == FLOOR_S


def test_unusual_work_gets_the_configured_limit_and_teaches_nothing(rank: Heartbeat, clock: Clock) -> None:
    steps(rank, clock, 1, 150)
    rank.use_configured_limit()
    assert (seen(rank).limit_s, seen(rank).wait_limit_s) == (300.0, math.inf)
    clock.now += 200
    steps(rank, clock, 152, 1)
    assert seen(rank).limit_s == FLOOR_S


def test_supervisor_reads_what_the_next_generation_needs(rank: Heartbeat, clock: Clock) -> None:
    steps(rank, clock, 1, 150)
    state = seen(rank)
    assert state.ranks == 2
    following = taught(SETTLED * [0.7], ranks=2, before=to_text(state.learned, state.ranks))
    assert following.limit("step").learned


def test_hang_with_another_learned_limit_is_the_same_fault() -> None:
    causes = [
        f"timed out: step, step 7, lasts longer than {limit} s, learned from the last {count} (99 % took at "
        f"most {share} s, 99.9 % 0.7 s), under timeouts.step_s = 300 s (noticed on rank 0)"
        for limit, count, share in (("12", "150", "0.7"), ("14", "1,000", "12.7"))
    ]
    assert Fault(1, "n", 7, causes[0]).is_like(Fault(1, "n", 7, causes[1]))


@pytest.mark.parametrize("kind", ["steady", "with_records", "slow"])
def test_simulated_run_has_no_false_alarm_and_names_the_stopped_rank(kind: str) -> None:
    outcome = simulate(hang.SYNTHETIC[kind], ranks=3, steps=4000, stops=40, seed=1)
    assert (outcome.false_alarms, outcome.wrong, outcome.not_learned) == (0, 0, 0)
    assert all(
        seconds <= max(hang.NAMED_S, limit + 1.0)
        for seconds, limit in zip(outcome.named_s, outcome.limit_s, strict=True)
    )


def test_long_steps_are_named_as_beyond_15_s_and_short_ones_are_not() -> None:
    outcomes = {
        kind: simulate(hang.SYNTHETIC[kind], ranks=3, steps=2000, stops=10, seed=1)
        for kind in ("steady", "slow")
    }
    report = hang.summary(outcomes)
    assert list(report["beyond_15_s"]) == ["slow"]  # type: ignore[call-overload]
    assert report["named_within_15_s"] == 0.5
    assert "NOT within 15 s" in hang.line("slow", outcomes["slow"], 1.0)
    assert "NOT" not in hang.line("steady", outcomes["steady"], 1.0)


def test_simulation_finds_limits_that_are_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_limits, "FLOOR_S", 1.0)
    monkeypatch.setattr(learned_limits, "P99_FACTOR", 1.0)
    monkeypatch.setattr(learned_limits, "P999_FACTOR", 1.0)
    outcome = simulate(hang.SYNTHETIC["steady"], ranks=3, steps=4000, stops=40, seed=1)
    assert outcome.false_alarms > 0


def test_recorded_steps_are_read(tmp_path: Path) -> None:
    (path,) = list(hang.RECORDED.glob("digits.json"))
    work = hang.recorded(path)
    assert simulate(work, ranks=4, steps=700, stops=4, seed=0).false_alarms == 0
