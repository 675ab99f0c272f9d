"""Lines of goodput.jsonl, and the seconds of a run by cause that follow from them."""

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.report_pages import charts, shown, state, written
from trainer.run.exit_files import ExitFiles
from trainer.telemetry.goodput_recorder import GoodputRecorder
from trainer.telemetry.metrics import Telemetry
from trainer.telemetry.records import Lap, Record

CAUSES = (
    "start", "data", "checkpoint", "evaluation", "stragglers", "detection", "recovery", "redone", "other"
)  # fmt: skip
Event = dict[str, Any]


def begin(at: float, **more: Any) -> Event:
    usual = {"event": "begin", "start": "a", "generation": 1, "began": at, "from_step": 0, "time": at}
    return {**usual, **more}


def steps(at: float, step: int, count: int, seconds: float, **parts: float) -> Event:
    return {"event": "steps", "time": at, "step": step, "steps": count, "seconds": seconds, **parts}


def restart(at: float, generation: int, step: int, *, start: str = "a", **more: Any) -> Event:
    return {"event": "restart", "start": start, "generation": generation, "step": step, "time": at, **more}


def end(at: float, code: int, *, start: str = "a", began: float = 0.0) -> Event:
    return {"event": "end", "start": start, "time": at, "exit_code": code, "began": began}


HALF = [begin(110, began=100), steps(113, 1, 1, 3), steps(123, 11, 10, 10)]
"""10 s of start, a first step of 3 s, then ten steps of 1 s."""


class Times:
    """Where the seconds of a run went, as its status says."""

    def __init__(self, events: list[Event]) -> None:
        with TemporaryDirectory() as folder:
            found = state(written(Path(folder), *events, name="goodput.jsonl"))
        self.whole_s: float = found["taken_s"] or 0.0
        self.useful_share: float | None = found["useful_share"]
        self.useful_s = self.whole_s * (self.useful_share or 0.0)
        self.lost_s: dict[str, float] = found["lost_s"]

    @property
    def lost(self) -> dict[str, float]:
        """The causes that took any time."""
        return {cause: round(seconds, 6) for cause, seconds in self.lost_s.items() if abs(seconds) > 1e-6}


CLOSE: Event = {"event": "close", "time": 123, "step": 11}
AGAIN = [restart(124, 2, 12), begin(130, generation=2, from_step=11)]
SECOND = [restart(123, 2, 12), begin(123, generation=2, from_step=8), steps(124, 9, 1, 1)]


@pytest.mark.parametrize(
    ("events", "lost", "useful_s"),
    [
        (
            [steps(136, 21, 10, 13, data_s=1.0, checkpoint_s=3.0, straggler_s=0.5),
             {"event": "evaluation", "time": 140, "step": 21, "seconds": 4.0},
             {"event": "close", "time": 141, "step": 21}, end(142, 0)],
            {"data": 1.0, "checkpoint": 3.0, "evaluation": 4.0, "stragglers": 0.5, "other": 2.0},
            1 + 10 + 13 - 1.0 - 3.0 - 0.5,
        ),
        # Three of the eleven logged steps come again; the fault came half a second into the twelfth.
        (
            [restart(123.5, 2, 12), begin(130.5, generation=2, from_step=8), steps(133.5, 9, 1, 3),
             steps(143.5, 19, 10, 10)],
            {"redone": 3.5, "recovery": 7.0 + 2.0}, 1 + 7 + 1 + 10,
        ),
        # Four steps are in no line: two were kept, one comes again, one was cut off; then 20 s of silence.
        (
            [restart(123 + 4 + 20, 2, 15), begin(150, generation=2, from_step=13)],
            {"redone": 2.0, "detection": 20.0, "recovery": 3.0}, 11 + 2,
        ),
        (
            [*AGAIN, {**AGAIN[0], "parts": {"detect": 2.0, "start": 1.0}, "seconds": 9.0}],
            {"redone": 1.0, "detection": 2.0, "recovery": 4.0}, 11,
        ),
        (
            [restart(134, 2, 0, kind="taken in", parts={"detect": 3.0}),
             begin(140, generation=2, from_step=11)],
            {"redone": 1.0, "recovery": 10.0 + 6.0}, 11,
        ),
        (
            [restart(124, 2, 12), restart(129, 3, 0), begin(135, generation=3, from_step=11)],
            {"redone": 1.0, "recovery": 11.0}, 11,
        ),
        # The third generation goes back behind what the second had kept of the first.
        (
            [*SECOND, restart(124, 3, 10), begin(124, generation=3, from_step=4), steps(125, 5, 1, 1)],
            {"redone": 7.0 + 1.0}, 4 + 1,
        ),
        (
            [CLOSE, end(124, 75), begin(1010, start="b", from_step=11, began=1000), steps(1011, 12, 1, 1)],
            {"start": 12.0 + 10.0, "other": 1.0}, 11 + 1,
        ),
        # The variable with the begin of a start may hold that of the allocation, which two starts share.
        ([end(123, 75), begin(140, start="b", from_step=11, began=100)], {"start": 12.0 + 17.0}, 11),
        ([begin(1010, start="b", from_step=13, began=1000)], {"start": 12.0 + 10.0}, 11 + 2),
        ([end(124, 1), begin(140, from_step=11, began=130)], {"redone": 1.0, "recovery": 16.0}, 11),
    ],
    ids=[
        "what the steps waited for",
        "steps that come again are redone",
        "steps after the last line count if they were kept",
        "seconds of the decision belong to the detection",
        "a planned restart had not to be noticed",
        "a fault during a restart is recovery too",
        "a step counts in the last generation that did it",
        "the time between two starts does not count",
        "no second counts in two starts",
        "a start without an end counts up to the last step that was kept",
        "supervisors that begin again leave no gap",
    ],
)  # fmt: skip
def test_time_is_lost_to(events: list[Event], lost: dict[str, float], useful_s: float) -> None:
    times = Times([*HALF, *events])
    assert times.lost == {"start": 12.0, **lost}
    assert times.useful_s == pytest.approx(useful_s)


def test_start_whose_ranks_never_trained_is_lost_unless_the_run_was_done() -> None:
    assert Times([end(130, 1, began=100)]).lost == {"start": 30.0}
    assert Times([end(130, 0, began=100)]).whole_s == 0.0
    assert Times([]).useful_share is None


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


@settings(max_examples=100)
@given(st.lists(EVENTS, max_size=12))
def test_whatever_the_lines_hold_no_cause_is_negative(events: list[Event]) -> None:
    times = Times(events)
    assert set(times.lost_s) == set(CAUSES)
    assert times.useful_s >= -1e-6
    assert all(seconds >= -1e-6 for seconds in times.lost_s.values())


def test_other_ranks_record_nothing() -> None:
    other = GoodputRecorder(None, start="a", generation=1, ranks=2, from_step=0, began=90.0)
    assert other.steps(1, Lap(1, 0.0, 1.0), 0.0, 0.0) == {}
    with other.evaluating(1):
        pass
    other.save(1)
    other.close(1, Lap())
    assert other.summary() == {}


def test_restart_is_a_line_when_it_begins_and_when_it_is_over_and_the_end_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPSHIP_BEGAN", "12.5")
    files = ExitFiles(str(tmp_path), "now")
    (tmp_path / ".lock").touch()
    row = {"generation": 2, "time": 5.0, "seconds": None, "details": "a trace"}

    async def work() -> None:
        for seconds in (None, None, 7.0):
            await files.update_restarts([{**row, "seconds": seconds}])
        await files.write("exit.json", {"exit_code": 1, "reason": "why"})

    asyncio.run(work())
    lines = [json.loads(line) for line in (tmp_path / "goodput.jsonl").read_text().splitlines()]
    begun, over, ended = lines
    assert (begun["event"], begun["seconds"]) == ("restart", None)
    assert (over["event"], over["seconds"]) == ("restart", 7.0)
    assert (ended["event"], ended["exit_code"], ended["began"]) == ("end", 1, 12.5)
    assert all(line["start"] == "now" and "details" not in line for line in lines)


def heads(folder: Path, events: list[Event]) -> list[str]:
    """What the report says of the generations of a run."""
    page = shown(written(folder / "run", *events, name="goodput.jsonl"))
    columns = charts(page).get("Time by cause, for each start and generation")
    return columns.hover["head"] if columns else ["one"]


@pytest.mark.parametrize("code", [0, 1, 75])
def test_end_of_a_start_without_a_launcher_comes_from_any_of_its_supervisors(
    tmp_path: Path, code: int
) -> None:
    """Each has a begin of its own."""
    first, close = begin(110, start="", began=100), {**CLOSE, "time": 124}
    events = [first, *HALF[1:], close, end(125, code, start="", began=100.004)]
    assert heads(tmp_path, events) == ["one"]
    assert Times(events).whole_s == pytest.approx(25)
    later = [first, *HALF[1:], end(530, 1, start="", began=500)]
    assert len(heads(tmp_path, later)) == 2, "one that fails early is not the end of the one before"
    assert Times(later).whole_s == pytest.approx(23 + 30)


# Looking at a run and starting it again take no longer for many steps.

STEPS = 800


def record(step: int) -> Record:
    return Record(step, 0, 8 * step, 1 / step, 0.1, 1.0, 14.0, 16.0, 0.5, 0.1, 0.4, 0.0, 0.0)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all JSON texts that are parsed."""
    found, loads = [], json.loads

    def counted(text: str | bytes, **how: Any) -> Any:
        found.append(len(text))
        return loads(text, **how)

    monkeypatch.setattr(json, "loads", counted)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that evaluates every 200 steps and was started again after half of them."""
    (tmp_path / "job.toml").write_text("[optim]\nsteps = 4000\n")
    clock = iter(range(10 * STEPS))
    for generation, begin in ((1, 0), (2, STEPS // 2)):
        with Telemetry(tmp_path / "metrics.jsonl", STEPS, begin, generation=generation) as telemetry:
            recorder = GoodputRecorder(
                tmp_path, start="s", generation=generation, ranks=2, from_step=begin, began=1.0,
                now=lambda: 10.0 + next(clock),
            )  # fmt: skip
            for step in range(begin + 1, begin + 1 + STEPS * (3 - generation) // 2 + 100 * (2 - generation)):
                telemetry.write(record(step), {"read_requests": 2, "read_bytes": 1000, "gpu_joules": 0.5})
                recorder.steps(step, Lap(1, 0.1, 0.4, 0.0, 0.0), 0.1, 0.05)
                if not step % 200:
                    telemetry.event({"step": step, "zero_shot_top1": step / STEPS})
                    recorder.save(step)
    return tmp_path


def test_status_sums_up_a_long_run_without_reading_all_of_it(run: Path, parsed: list[int]) -> None:
    parsed.clear()
    found = state(run)
    assert len(parsed) < STEPS / 4
    assert (found["step"], found["evaluation"]) == (STEPS, {"step": STEPS, "zero_shot_top1": 1})
    assert (found["reading"]["requests"], found["reading"]["bytes"]) == (2 * STEPS, 1000 * STEPS)
    assert found["energy_j"] == STEPS / 2
    lines = [json.loads(line) for line in (run / "goodput.jsonl").read_text().splitlines()]
    each = [{name: value for name, value in line.items() if name != "so_far"} for line in lines]
    (run / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    of_all_lines = state(run)
    assert found["useful_share"] == pytest.approx(of_all_lines["useful_share"])
    assert found["lost_s"] == pytest.approx(of_all_lines["lost_s"])
    assert found["lost_s"]["redone"] > 0
