"""The line that `clipship run` rewrites in a terminal while rank 0 prints nothing."""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from trainer.launch import live_line
from trainer.text import live
from trainer.text.fitting import fitted
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


# Lines that fit a terminal, and the progress of a long work: there in a line, elsewhere now and then.

STEP = (
    "step  4/20  epoch 1  loss 3.1  lr 1.00e-04  grad 2.0  scale 14.3  9 samples/s  data 0% comm 1%  ETA 0:20"
)


@pytest.mark.parametrize(
    ("line", "columns", "expected"),
    [
        ("short\n", 40, "short\n"),
        ("batch        32 = 2 ranks x 16\n", 25, "batch        32 = 2 ranks\n             x 16\n"),
        ("no topic but many words here", 20, "no topic but many\n  words here"),
        ("result       /" + "a" * 40, 20, "result       /" + "a" * 40),
        (STEP, len(STEP), STEP),
        (STEP, 100, STEP.replace("data 0% comm 1%  ", "")),
        (STEP, 60, "step  4/20  loss 3.1  lr 1.00e-04  9 samples/s  ETA 0:20"),
        (STEP, 20, "step  4/20  loss 3.1  9 samples/s  ETA 0:20"),
    ],
)
def test_a_line_is_folded_between_words_and_a_step_loses_parts(
    line: str, columns: int, expected: str
) -> None:
    assert fitted(line, columns) == expected


def test_progress_is_said_every_ten_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("trainer.text.live.time.monotonic", lambda: now)
    with live.progress("reading", "read", "shard") as done:
        for count in range(1, 31):
            now += 1.0
            done(count, 3000)
    assert capsys.readouterr().err.splitlines() == [
        "clipship: read 12 of 3,000 shards",
        "clipship: read 23 of 3,000 shards",
    ]


def test_a_terminal_gets_a_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Line:
        moves = True

        def __init__(self, text: Callable[[float], str]) -> None:
            self.text = text

        def __enter__(self) -> "Line":
            return self

        def __exit__(self, *_: object) -> None:
            lines.append(self.text(0.0))

    monkeypatch.setattr(live, "LiveText", Line)
    monkeypatch.setattr("trainer.text.live.time.monotonic", lambda: 0.0)
    with live.progress("packing [a].csv", "packed", "row"):
        pass
    with live.progress("packing", "packed", "row") as done:
        done(1, 1)
    assert lines == ["packing [a].csv  0 s", "packed 1 of 1 row  0 s"]
