"""The progress of a long work is shown in one way: in a terminal in a line, elsewhere now and then."""

from collections.abc import Callable

import pytest

from trainer.text import live


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
