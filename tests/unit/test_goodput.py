"""Lines of goodput.jsonl, and the seconds of a run by cause that follow from them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.report.times import restart_steps
from trainer.run import goodput_log
from trainer.run.exit_files import ExitFiles
from trainer.run.layout import EXIT_FILE, GOODPUT_FILE
from trainer.telemetry.goodput import CAUSES, Goodput, generations, goodput, shown_causes
from trainer.telemetry.goodput_recorder import GoodputRecorder
from trainer.telemetry.records import Lap

Event = dict[str, Any]


def begin(
    at: float, *, start: str = "a", generation: int = 1, from_step: int = 0, began: float = 0.0
) -> Event:
    return {
        "event": "begin",
        "start": start,
        "generation": generation,
        "began": began or at,
        "from_step": from_step,
        "time": at,
    }


def steps(at: float, step: int, count: int, seconds: float, **parts: float) -> Event:
    return {"event": "steps", "time": at, "step": step, "steps": count, "seconds": seconds, **parts}


def restart(at: float, generation: int, step: int, *, start: str = "a", **more: Any) -> Event:
    return {"event": "restart", "start": start, "generation": generation, "step": step, "time": at, **more}


def end(at: float, code: int, *, start: str = "a", began: float = 0.0) -> Event:
    return {"event": "end", "start": start, "time": at, "exit_code": code, "began": began}


HALF = [begin(110, began=100), steps(113, 1, 1, 3), steps(123, 11, 10, 10)]
"""10 s of start, a first step of 3 s, then ten steps of 1 s."""


def lost(times: Goodput) -> dict[str, float]:
    """The causes that took any time."""
    return {cause: round(seconds, 6) for cause, seconds in times.lost_s.items() if abs(seconds) > 1e-6}


def test_run_without_a_fault_loses_its_start_and_what_the_steps_waited_for() -> None:
    events = [
        *HALF,
        steps(136, 21, 10, 13, data_s=1.0, checkpoint_s=2.0, straggler_s=0.5),
        {"event": "evaluation", "time": 140, "step": 21, "seconds": 4.0},
        {"event": "close", "time": 141, "step": 21},
        end(142, 0),
    ]
    times = goodput(events)
    usual_s = (10 + 13 - 2) / 20
    assert lost(times) == {
        "start": pytest.approx(10 + 3 - usual_s),
        "data": 1.0,
        "checkpoint": 2.0,
        "evaluation": 4.0,
        "stragglers": 0.5,
        "other": 2.0,
    }
    assert times.useful_s == pytest.approx(usual_s + 10 + 13 - 1.0 - 2.0 - 0.5)
    assert times.whole_s == pytest.approx(42)
    assert times.useful_share == pytest.approx(times.useful_s / 42)


def test_steps_that_the_next_generation_does_again_are_redone() -> None:
    """Three of the eleven logged steps come again; the fault came half a second into the twelfth."""
    events = [
        *HALF,
        restart(123.5, 2, step=12),
        begin(130.5, generation=2, from_step=8),
        steps(133.5, 9, 1, 3),
        steps(143.5, 19, 10, 10),
    ]
    times = goodput(events)
    assert lost(times) == {"start": 12.0, "redone": 3.5, "recovery": 7.0 + 2.0}
    assert times.useful_s == pytest.approx(1 + 7 + 1 + 10)
    assert times.whole_s == pytest.approx(43.5)


def test_steps_after_the_last_line_count_if_the_next_generation_goes_on_behind_them() -> None:
    """Four steps are in no line: two were kept, one comes again, one was cut off; then 20 s of silence."""
    events = [*HALF, restart(123 + 4 + 20, 2, step=15), begin(150, generation=2, from_step=13)]
    times = goodput(events)
    assert lost(times) == {"start": 12.0, "redone": 2.0, "detection": 20.0, "recovery": 3.0}
    assert times.useful_s == pytest.approx(11 + 2)


def test_seconds_of_the_decision_belong_to_the_detection() -> None:
    events = [*HALF, restart(124, 2, 12), begin(130, generation=2, from_step=11)]
    with_parts = {**events[-2], "parts": {"detect": 2.0, "start": 1.0}, "seconds": 9.0}
    assert lost(goodput([*events, with_parts])) == {
        "start": 12.0,
        "redone": 1.0,
        "detection": 2.0,
        "recovery": 4.0,
    }


def test_planned_restart_is_no_fault_that_had_to_be_noticed() -> None:
    planned = restart(134, 2, 0, kind="taken in", parts={"detect": 3.0})
    events = [*HALF, planned, begin(140, generation=2, from_step=11)]
    assert lost(goodput(events)) == {"start": 12.0, "redone": 1.0, "recovery": 10.0 + 6.0}


def test_fault_during_a_restart_is_recovery_too() -> None:
    events = [*HALF, restart(124, 2, 12), restart(129, 3, 0), begin(135, generation=3, from_step=11)]
    assert lost(goodput(events)) == {"start": 12.0, "redone": 1.0, "recovery": 11.0}


def test_step_counts_in_the_last_generation_that_did_it() -> None:
    """The third generation goes back behind what the second had kept of the first."""
    second = [restart(123, 2, 12), begin(123, generation=2, from_step=8), steps(124, 9, 1, 1)]
    third = [restart(124, 3, 10), begin(124, generation=3, from_step=4), steps(125, 5, 1, 1)]
    times = goodput([*HALF, *second, *third])
    assert lost(times) == {"start": 12.0, "redone": 7.0 + 1.0}
    assert times.useful_s == pytest.approx(4 + 1)


def test_time_between_two_starts_does_not_count() -> None:
    events = [
        *HALF,
        {"event": "close", "time": 123, "step": 11},
        end(124, 75),
        begin(1010, start="b", from_step=11, began=1000),
        steps(1011, 12, 1, 1),
    ]
    times = goodput(events)
    assert times.whole_s == pytest.approx(24 + 11)
    assert lost(times) == {"start": 12.0 + 10.0, "other": 1.0}


def test_no_second_counts_in_two_starts() -> None:
    """The variable with the begin of a start may hold that of the allocation, which two starts share."""
    events = [*HALF, end(123, 75), begin(140, start="b", from_step=11, began=100)]
    assert goodput(events).whole_s == pytest.approx(40)


def test_start_that_left_no_end_counts_up_to_the_last_step_that_was_kept() -> None:
    events = [*HALF, begin(1010, start="b", from_step=13, began=1000)]
    times = goodput(events)
    assert times.useful_s == pytest.approx(13)
    assert times.whole_s == pytest.approx(23 + 2 + 10)


def test_supervisors_that_begin_again_in_the_same_start_leave_no_gap() -> None:
    events = [*HALF, end(124, 1), begin(140, from_step=11, began=130)]
    assert lost(goodput(events)) == {"start": 12.0, "redone": 1.0, "recovery": 16.0}


def test_start_whose_ranks_never_trained_is_lost_unless_the_run_was_done() -> None:
    assert lost(goodput([end(130, 1, began=100)])) == {"start": 30.0}
    assert goodput([end(130, 0, began=100)]).whole_s == 0.0
    assert goodput([]).useful_share is None


NUMBERS = st.one_of(st.none(), st.text(max_size=2), st.floats(), st.integers(-5, 200), st.just([1]))
EVENTS = st.builds(
    lambda event, start, values: {"event": event, "start": start, **values},
    st.sampled_from(["begin", "steps", "evaluation", "close", "restart", "end", "else"]),
    st.sampled_from(["a", "b", ""]),
    st.dictionaries(
        st.sampled_from(
            [
                *("time", "step", "steps", "seconds", "data_s", "checkpoint_s", "straggler_s"),
                *("from_step", "began", "exit_code", "generation", "parts"),
            ]
        ),
        NUMBERS,
    ),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=12))
def test_whatever_the_lines_hold_no_cause_is_negative(events: list[Event]) -> None:
    times = goodput(events)
    assert set(times.lost_s) == set(CAUSES)
    assert times.useful_s >= -1e-6
    assert all(seconds >= -1e-6 for seconds in times.lost_s.values())


def test_causes_are_shown_largest_first_without_tiny_ones() -> None:
    times = Goodput(1000.0, {**dict.fromkeys(CAUSES, 0.0), "data": 5.0, "start": 50.0, "other": 0.1})
    assert list(shown_causes(times)) == [("start", 50.0), ("data", 5.0)]


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def recorder(folder: Path, now: Now, **more: Any) -> GoodputRecorder:
    values = {"start": "a", "generation": 1, "ranks": 2, "from_step": 0, "began": 90.0, **more}
    return GoodputRecorder(folder, now=now, **values)


def test_recorder_says_after_each_record_what_its_lines_say(tmp_path: Path) -> None:
    now = Now()
    first = recorder(tmp_path, now)
    for step, count in ((1, 1), (5, 4), (9, 4)):
        now.at += count
        record = first.steps(step, Lap(count, 0.1, 0.9 * count - 0.1, 0.1 * count, 0.0), 0.02, 0.01)
        told = goodput(goodput_log.read(tmp_path))
        assert record["useful_share"] == pytest.approx(told.useful_share, abs=1e-4)
        assert record["lost_stragglers_s"] == pytest.approx(told.lost_s["stragglers"], abs=1e-3)
    (tmp_path / ".lock").touch()
    ExitFiles(str(tmp_path), "a")._write_restarts(
        [{"generation": 2, "step": 11, "time": 110.5, "cause": "killed", "details": "long"}]
    )
    now.at = 115.0
    second = recorder(tmp_path, now, generation=2, from_step=4)
    now.at = 116.0
    record = second.steps(5, Lap(1, 0.0, 1.0, 0.0, 0.0), 0.0, 0.0)
    told = goodput(goodput_log.read(tmp_path))
    assert record["lost_redone_s"] == pytest.approx(told.lost_s["redone"], abs=1e-3)
    assert told.lost_s["redone"] > 5.0
    assert second.summary()["seconds"] == pytest.approx(116.0 - 90.0)


def test_other_ranks_record_nothing(tmp_path: Path) -> None:
    other = recorder(None, Now())  # type: ignore[arg-type]
    assert other.steps(1, Lap(1, 0.0, 1.0), 0.0, 0.0) == {}
    with other.evaluating(1):
        pass
    other.save(1)
    other.close(1, Lap())
    assert other.summary() == {}


def test_restart_is_a_line_when_it_begins_and_when_it_is_over_and_the_end_is_one(tmp_path: Path) -> None:
    files = ExitFiles(str(tmp_path), "now")
    (tmp_path / ".lock").touch()
    row = {"generation": 2, "time": 5.0, "seconds": None, "details": "a trace"}

    async def work() -> None:
        await files.update_restarts([row])
        await files.update_restarts([row])
        await files.update_restarts([{**row, "seconds": 7.0}])
        await files.write(EXIT_FILE, {"exit_code": 1, "reason": "why"})
        await files.write(EXIT_FILE, {"exit_code": 2, "reason": "a later one does not count"})

    asyncio.run(work())
    lines = goodput_log.read(tmp_path)
    assert [(line["event"], line.get("seconds"), line.get("exit_code")) for line in lines] == [
        ("restart", None, None),
        ("restart", 7.0, None),
        ("end", None, 1),
    ]
    assert all(line["start"] == "now" and "details" not in line for line in lines)


def test_saves_are_counted(tmp_path: Path) -> None:
    now = Now()
    first = recorder(tmp_path, now)
    first.steps(1, Lap(1, 0.0, 1.0), 0.0, 0.0)
    first.save(1)
    first.steps(5, Lap(4, 0.0, 4.0), 0.0, 0.0)
    first.save(5)
    (its,) = generations(goodput_log.read(tmp_path))
    assert (its.saves, its.step) == (2, 5)


def test_line_that_a_killed_process_left_unfinished_spoils_no_other(tmp_path: Path) -> None:
    goodput_log.append(tmp_path, {"event": "begin"})
    with open(tmp_path / GOODPUT_FILE, "a") as file:
        file.write('{"event": "ste')
    goodput_log.append(tmp_path, {"event": "close", "value": float("nan")})
    assert goodput_log.read(tmp_path) == [{"event": "begin"}, {"event": "close", "value": None}]
    assert [json.loads(line) for line in (tmp_path / GOODPUT_FILE).read_text().splitlines()[::2]]
    assert goodput_log.read(tmp_path / "missing") == []


@pytest.mark.parametrize(("value", "expected"), [("12.5", 12.5), ("", 3.0), ("x", 3.0), (None, 3.0)])
def test_begin_of_a_start_comes_from_its_variable(value: str | None, expected: float) -> None:
    env = {} if value is None else {goodput_log.BEGAN: value}
    assert goodput_log.began(env, 3.0) == expected


@pytest.mark.parametrize("code", [0, 1, 75])
def test_end_of_a_start_without_a_launcher_comes_from_any_of_its_supervisors(code: int) -> None:
    """Each has a begin of its own."""
    first, close = begin(110, start="", began=100), {"event": "close", "time": 124, "step": 11}
    events = [first, *HALF[1:], close, end(125, code, start="", began=100.004)]
    assert len(generations(events)) == 1
    assert goodput(events).whole_s == pytest.approx(25)


def test_a_start_without_a_launcher_that_fails_early_is_not_the_end_of_the_one_before() -> None:
    events = [begin(110, start="", began=100), *HALF[1:], end(530, 1, start="", began=500)]
    assert len(generations(events)) == 2
    assert goodput(events).whole_s == pytest.approx(23 + 30)


@pytest.mark.parametrize("start", ["a", ""])
def test_the_next_stage_of_a_run_starts_again_and_is_no_recovery(start: str) -> None:
    """Also in a start without a launcher, which has no name."""
    close = {"event": "close", "time": 124, "step": 11, "generation": 1}
    first, stage = (begin(at, start=start, from_step=step, began=100) for at, step in ((110, 0), (130, 11)))
    events = [first, *HALF[1:], close, stage, steps(131, 12, 1, 1), steps(141, 22, 10, 10)]
    times = goodput(events)
    found = generations(events)
    assert [(its.from_step, its.next_stage) for its in found] == [(0, False), (11, True)]
    assert lost(times)["start"] == pytest.approx(12 + 6, abs=1.0)
    assert "recovery" not in lost(times)
    assert restart_steps(found) == []
    assert restart_steps(found, stages=True) == [11]
