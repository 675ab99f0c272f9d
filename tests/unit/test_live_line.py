"""The line that `clipship run` rewrites in a terminal while rank 0 prints nothing."""

import io
import time
from typing import Any

import pytest

from trainer.config.phases import SILENT
from trainer.launch import live_line
from trainer.launch.live_line import LiveLine, words
from trainer.supervise.heartbeat import RankState


def state(phase: str, began: float) -> RankState:
    return RankState(phase, 60.0, 3, began, 0, "", False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("rank", "begun", "now", "said"),
    [
        (None, False, 10.9, ""),
        (None, False, 12.0, "starting  2 s"),
        (state("init", 11.9), True, 12.0, "starting  2 s"),  # the start counts from the command
        (state("first step", 14.0), True, 17.2, "first step  3 s"),
        (state("checkpoint", 17.0), True, 17.5, ""),
        (state("evaluation", 17.0), True, 137.0, "evaluation  120 s"),
        (state("step", 14.0), True, 90.0, ""),  # steps have lines of their own
        (state("shutdown", 90.0), True, 92.0, "ending  2 s"),
        (None, True, 99.0, ""),
    ],
)
def test_the_line_says_what_lasts(rank: RankState | None, begun: bool, now: float, said: str) -> None:
    assert words(rank, begun=begun, since=10.0, now=now) == said


def test_the_line_is_covered_by_any_line_of_a_rank() -> None:
    longest = max(len(words(state(phase, 0.0), begun=True, since=0.0, now=999.0)) for phase in SILENT)
    assert longest <= len("run folder   /runs/a")


def shown(out: Any, seconds: float, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(live_line, "FROM_S", 0.0)
    with LiveLine(lambda: (state("init", 0.0), True), 2, out):
        time.sleep(seconds)
    text: str = out.getvalue()
    return text


def test_a_terminal_has_the_line_and_no_trace_of_it_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = shown(Terminal(), 0.8, monkeypatch)
    assert text.startswith("\r\x1b[Kstarting")
    assert text.endswith("\r\x1b[K")


def test_a_file_gets_whole_lines_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(io.StringIO(), 0.3, monkeypatch) == ""
    assert capsys.readouterr().err == "clipship: starting 2 ranks: importing torch, connecting\n"
