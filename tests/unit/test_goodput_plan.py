"""The simulated share of useful time against closed forms, and its determinism."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.errors import InputError
from trainer.estimate.faults import (
    Fault,
    Plan,
    best_interval_s,
    daly_s,
    draw_faults,
    expect,
    parse_faults,
    simulate,
    young_s,
)

ONE = Plan(node_mtbf_s=10_000, node_loss_share=0.0, interval_s=500, checkpoint_s=12, restart_s=55, detect_s=5)
"""One node whose state survives nowhere but on disk."""


def test_run_without_faults_loses_its_start_and_its_checkpoints() -> None:
    plan = Plan(interval_s=90, checkpoint_s=10, start_s=30)
    outcome = simulate(plan, [], 530)
    assert outcome.lost_s == {**dict.fromkeys(outcome.lost_s, 0.0), "start": 30, "checkpoint": 50}
    assert outcome.useful_share == pytest.approx(450 / 530)
    assert simulate(replace(plan, interval_s=math.inf), [], 530).useful_s == pytest.approx(500)


def test_fault_loses_what_was_done_since_the_last_whole_checkpoint() -> None:
    """At 350 the checkpoint of 290 to 300 is still being written, so that of 190 to 200 counts."""
    plan = Plan(interval_s=90, checkpoint_s=10, write_s=60, detect_s=7, restart_s=20)
    outcome = simulate(plan, [Fault(350, 0, lost=False, in_memory=False)], 477)
    assert outcome.lost_s["redone"] == pytest.approx(90 + 50)
    assert (outcome.lost_s["detection"], outcome.lost_s["recovery"]) == (7, 20)
    assert outcome.useful_s == pytest.approx(180 + 90)
    assert outcome.useful_s + sum(outcome.lost_s.values()) == pytest.approx(477)


def test_state_in_memory_loses_only_the_step_that_was_cut_off() -> None:
    plan = Plan(interval_s=math.inf, step_s=4, detect_s=1, restart_s=9)
    outcome = simulate(plan, [Fault(103, 0, lost=False, in_memory=True)], 213)
    assert outcome.lost_s["redone"] == pytest.approx(3)
    assert outcome.useful_s == pytest.approx(200)


def test_fault_during_a_restart_begins_the_restart_again() -> None:
    faults = [Fault(100, 0, False, True), Fault(105, 0, False, True)]
    outcome = simulate(Plan(interval_s=math.inf, detect_s=2, restart_s=10), faults, 200)
    assert (outcome.lost_s["detection"], outcome.lost_s["recovery"]) == (4, 13)
    assert outcome.useful_s == pytest.approx(183)


def test_spare_takes_the_place_of_a_lost_node_and_without_one_the_run_waits_or_shrinks() -> None:
    plan = Plan(nodes=4, interval_s=math.inf, detect_s=0, restart_s=10, repair_s=100, memory_share=1.0)
    faults = [Fault(50, 1, lost=True, in_memory=True)]
    waits = simulate(plan, faults, 250)
    assert (waits.lost_s["nodes"], waits.lost_s["recovery"]) == (90, 20)
    spare = simulate(replace(plan, spares=1), faults, 250)
    assert (spare.lost_s["nodes"], spare.lost_s["recovery"]) == (0, 10)
    assert spare.work_share == spare.useful_share
    fewer = simulate(replace(plan, min_nodes=3), faults, 250)
    assert (fewer.lost_s["nodes"], fewer.lost_s["recovery"]) == (0, 20)
    assert fewer.useful_s == pytest.approx(230)
    assert fewer.work_s == pytest.approx(230 - 90 / 4)


def test_overhead_of_steps_is_no_useful_time() -> None:
    outcome = simulate(Plan(interval_s=math.inf, overhead_share=0.1), [], 100)
    assert outcome.useful_s == pytest.approx(90)
    assert outcome.lost_s["steps"] == pytest.approx(10)


@pytest.mark.parametrize(("interval_s", "nodes"), [(100, 1), (500, 1), (2000, 1), (500, 4), (1500, 8)])
def test_share_is_that_of_the_closed_form_for_exponential_faults(interval_s: float, nodes: int) -> None:
    """Expected time of one interval, Daly 2006: M exp(R/M) (exp((interval + C)/M) - 1)."""
    plan = replace(ONE, interval_s=interval_s, nodes=nodes)
    mtbf_s, restart_s = plan.mtbf_s, plan.restart_s + plan.detect_s
    cycle_s = interval_s + plan.checkpoint_s
    exact = interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(cycle_s / mtbf_s))
    assert expect(plan).useful_share == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("checkpoint_s", [5, 12, 100])
def test_best_interval_is_dalys(checkpoint_s: float) -> None:
    plan = replace(ONE, checkpoint_s=checkpoint_s)
    best = best_interval_s(plan)
    assert best == pytest.approx(daly_s(checkpoint_s, plan.mtbf_s), rel=0.06)
    assert young_s(checkpoint_s, plan.mtbf_s) == pytest.approx(best, rel=0.12)


def test_there_is_no_best_interval_without_a_cost_or_without_a_need() -> None:
    assert best_interval_s(replace(ONE, checkpoint_s=0)) is None
    assert best_interval_s(replace(ONE, memory_share=1)) is None


def test_dalys_interval_is_the_mean_time_between_faults_where_saving_takes_longer() -> None:
    assert daly_s(300, 100) == 100
    assert daly_s(1, 1e9) == pytest.approx(young_s(1, 1e9), rel=1e-4)


def test_same_seed_gives_the_same_faults_and_the_same_share() -> None:
    plan = replace(ONE, nodes=3, memory_share=0.5, node_loss_share=0.5, repair_s=500)
    faults = draw_faults(plan, 1e6, 7)
    assert faults == draw_faults(plan, 1e6, 7)
    assert faults != draw_faults(plan, 1e6, 8)
    other = draw_faults(replace(plan, interval_s=1, memory_share=0), 1e6, 7)
    assert [fault.at for fault in faults] == [fault.at for fault in other]
    assert len(faults) == pytest.approx(1e6 / plan.mtbf_s, rel=0.2)
    assert expect(plan, 3) == expect(plan, 3)
    assert expect(plan, 3) != expect(plan, 4)


def test_faults_are_given_by_their_times() -> None:
    plan = Plan(nodes=2, memory_share=1.0)
    assert parse_faults(["200:node, 60", "300:all"], plan) == [
        Fault(60.0, 1, lost=False, in_memory=True),
        Fault(200.0, 0, lost=True, in_memory=True),
        Fault(300.0, 0, lost=False, in_memory=False),
    ]
    assert not any(fault.in_memory for fault in parse_faults(["1", "2:node"], Plan(nodes=2)))
    assert not parse_faults(["2:node"], replace(plan, nodes=1))[0].in_memory
    for wrong in ("x", "-1", "60:disk", "nan", "inf"):
        with pytest.raises(InputError, match="give seconds since the begin"):
            parse_faults([wrong], plan)


@settings(max_examples=200, deadline=None)
@example(
    Plan(
        nodes=2,
        spares=0,
        min_nodes=1,
        node_mtbf_s=20.0,
        node_loss_share=0.5,
        repair_s=1.0,
        step_s=5.0,
        interval_s=1.0,
        checkpoint_s=8.0,
        write_s=0.0,
        detect_s=0.0,
        restart_s=0.0,
        start_s=0.0,
        memory_share=1.0,
    ),
    0,
)
@given(
    st.builds(
        Plan,
        nodes=st.integers(1, 4),
        spares=st.integers(0, 2),
        min_nodes=st.one_of(st.none(), st.just(1)),
        node_mtbf_s=st.floats(20, 5000),
        node_loss_share=st.sampled_from([0.0, 0.5, 1.0]),
        repair_s=st.floats(1, 500),
        step_s=st.floats(0.1, 10),
        interval_s=st.one_of(st.floats(1, 500), st.just(math.inf)),
        checkpoint_s=st.floats(0, 20),
        write_s=st.floats(0, 600),
        detect_s=st.floats(0, 10),
        restart_s=st.floats(0, 50),
        start_s=st.floats(0, 50),
        memory_share=st.sampled_from([0.0, 0.5, 1.0]),
    ),
    st.integers(0, 100),
)
def test_every_second_has_one_cause(plan: Plan, seed: int) -> None:
    outcome = simulate(plan, draw_faults(plan, 2000, seed), 2000)
    assert outcome.useful_s + sum(outcome.lost_s.values()) == pytest.approx(2000, abs=1e-6)
    assert min(outcome.useful_s, *outcome.lost_s.values()) >= -1e-9
    assert -1e-9 <= outcome.work_s <= outcome.useful_s + 1e-9
