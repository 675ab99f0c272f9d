"""The line that `clipship run` rewrites in a terminal while rank 0 prints nothing."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from trainer.launch import live_line
from trainer.text import live
from trainer.world.heartbeat import RankState


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
