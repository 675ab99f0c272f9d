"""Lines that fit a terminal, and the progress of a long work: there in a line, elsewhere now and then."""

from collections.abc import Callable

import pytest

from trainer.text import live
from trainer.text.fitting import fitted

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
