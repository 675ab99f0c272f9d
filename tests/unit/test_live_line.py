"""The line that `clipship run` rewrites in a terminal while rank 0 prints nothing."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import pytest

from trainer.config import phases
from trainer.launch import live_line
from trainer.text import live
from trainer.world.heartbeat import RankState

LAST = {"preflight": 5.0, "checkpoint": 0.9, "evaluation": 200.0}


def state(phase: str, began: float, step: int = 3, stage: str = "", stage_began: float = 0.0) -> RankState:
    return RankState(phase, 60.0, step, began, 0, "", False, stage=stage, stage_began=stage_began)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def xterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def lines(
    shown: Sequence[tuple[float, RankState | None]], *, begun: bool = True, **options: Any
) -> list[str]:
    """Returns what the line says at each of these times, in which rank 0 is in that state."""
    states: Iterator[RankState | None] = iter([each for _, each in shown])
    line = live_line.LiveLine(lambda: (next(states), begun), 2, out=io.StringIO(), **options)
    return [line.line(now) for now, _ in shown]


def test_a_start_names_its_stages_from_its_first_second_on() -> None:
    assert lines([(10.0, None), (10.9, None), (12.0, None)], begun=False) == ["", "", "starting ranks  2 s"]
    loading, index = (
        state("init", 0.0, stage="loading torch", stage_began=10.5),
        state("init", 0.0, stage="data index", stage_began=14.0),
    )
    assert lines([(10.0, loading), (12.0, loading), (14.1, index)]) == [
        "",
        "loading torch  1 s",
        "data index  0 s",  # the line stays, as the start goes on
    ]


@pytest.mark.parametrize(
    ("rank", "now", "said"),
    [
        (state("first step", 14.0), 17.2, "first step  3 s"),
        (state("checkpoint", 17.0), 17.5, ""),
        (state("evaluation", 17.0), 137.0, "evaluation  2 min 0 s"),
        (state("shutdown", 90.0), 92.0, "ending  2 s"),
        (None, 99.0, ""),
    ],
)
def test_the_line_says_what_lasts(rank: RankState | None, now: float, said: str) -> None:
    assert lines([(now, rank)]) == [said]


def test_steps_show_their_number_where_they_have_no_line_of_their_own() -> None:
    steps = [(now, state("step", now - 0.1, step)) for now, step in ((20.0, 11), (20.5, 12), (21.5, 14))]
    assert lines(steps, every_steps=10) == ["", "", "step 14"]
    printed = (21.6, state("step", 21.6, 21))
    assert lines([*steps, printed], every_steps=10)[-1] == ""
    assert lines(steps, every_steps=1) == ["", "", ""]
    assert lines([(24.0, state("step", 20.0, 5))], every_steps=1) == ["step 5  4 s"]
    assert lines([(24.0, state("data", 20.0, 5))]) == ["step 5, waiting for data  4 s"]


@pytest.mark.parametrize(
    ("part", "taken", "said"),
    [
        ("preflight", 2.0, "preflight  2 s of about 5 s"),
        ("preflight", 7.0, "preflight  7 s (5 s last time)"),
        ("evaluation", 3.0, "evaluation  3 s of about 3 min 20 s"),
        ("checkpoint", 3.0, "checkpoint  3 s"),
        ("building model", 3.0, "building model  3 s"),
    ],
)
def test_the_line_says_how_long_it_took_the_last_time(part: str, taken: float, said: str) -> None:
    assert live_line.words(live_line.Part(part, 10.0), 10.0 + taken, LAST) == said


def test_the_short_line_is_covered_by_any_line_of_a_rank() -> None:
    parts = [*live_line.START, *phases.SILENT, live_line.ENDING, "step 1", "step 999,999"]
    for part in parts:
        line = live_line.words(live_line.Part(part, 0.0), 99.0, {part: 99.0}, short=True)
        assert len(line) <= len("run folder   /runs/a1")
    assert max(map(len, get_args(phases.Stage))) <= 16, "the room of a stage in the heartbeat"


def test_the_line_knows_how_long_the_last_evaluation_of_the_run_took() -> None:
    first, second = state("evaluation", 20.0), state("evaluation", 30.0)
    shown = [(20.0, first), (24.0, state("step", 24.0)), (32.0, second), (50.0, state("step", 50.0))]
    assert lines(shown) == ["", "", "evaluation  2 s of about 4 s", ""]


def shown(out: Any, until: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns what `out` gets from a line that stays until then."""
    monkeypatch.setattr(live_line, "FROM_S", 0.0)
    init = state("init", 0.0, stage="loading torch", stage_began=time.monotonic())
    with live_line.LiveLine(lambda: (init, True), 2, out=out):
        while not until():
            time.sleep(0.01)
    text: str = out.getvalue()
    return text


def test_a_terminal_has_the_line_and_no_trace_of_it_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    text = shown(terminal, terminal.getvalue, monkeypatch)
    assert text.startswith("\r\x1b[Kloading torch")
    assert text.endswith("\r\x1b[K")


def test_a_command_that_takes_long_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FROM_S", 0.0)
    monkeypatch.setattr("trainer.text.live.time.monotonic", lambda: 0.0)
    terminal, file = Terminal(), io.StringIO()
    with live.waiting("checking job.toml", terminal), live.waiting("checking job.toml", file):
        while not terminal.getvalue():
            time.sleep(0.01)
    assert terminal.getvalue() == "\r\x1b[Kchecking job.toml  0 s\r\r\x1b[K"
    assert file.getvalue() == ""


def test_a_file_gets_whole_lines_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def has_said() -> bool:
        said.append(capsys.readouterr().err)
        return bool(said[-1])

    assert shown(io.StringIO(), has_said, monkeypatch) == ""
    assert "".join(said) == "clipship: starting 2 ranks: importing torch, connecting\n"
