"""`make bench-step`: the order of its turns, and what its last line says."""

import importlib.util
import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import step as benchmark


@pytest.fixture(autouse=True)
def _own_signal_handler() -> Iterator[None]:
    """Puts back the handler of SIGTERM, which the benchmark replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Scripted:
    """A side whose steps take given seconds; it notes its name in a list whenever it makes one."""

    def __init__(self, name: str, seconds: list[float], order: list[str]) -> None:
        self.name, self._seconds, self._order = name, iter(seconds), order

    def step(self) -> float:
        self._order.append(self.name)
        return next(self._seconds)

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves nothing behind."""


def test_sides_begin_in_turn_after_both_have_warmed_up(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []
    one = Scripted("one", [9, 9, 1, 2, 3], order)
    other = Scripted("other", [9, 9, 4, 5, 6], order)
    assert benchmark.in_turns(one, other, 3) == [(1, 4), (2, 5), (3, 6)]
    assert order[4:] == ["one", "other", "other", "one", "one", "other"]
    assert capsys.readouterr().out.splitlines()[0] == "pair 1: one 1.000 s, other 4.000 s"


def test_the_last_line_has_both_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    def side(name: str, *_: Any) -> Scripted:
        return Scripted(name, [9, 9, 2, 2] if name == "ours" else [9, 9, 3, 3], [])

    monkeypatch.setattr(benchmark, "Side", side)
    monkeypatch.setattr(benchmark, "turns_of", lambda *_: [(1.0, 1.0), (1.2, 1.0), (3.0, 2.0)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    result = CliRunner().invoke(benchmark.main, ["--pairs", "2"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output.splitlines()[-1])
    assert (told["speed"], told["horovod_over_ddp"], told["pairs"]) == (1.5, 1.2, 2)


def test_without_horovod_the_benchmark_says_that_ranks_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "Side", lambda name, *_: Scripted(name, [1] * 3, []))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = CliRunner().invoke(benchmark.main, ["--pairs", "1"])
    assert "Horovod is not installed" in result.output
    assert json.loads(result.output.splitlines()[-1])["horovod_over_ddp"] is None


def test_a_side_that_ends_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with (
        benchmark.Side("ours", "ViT-B-32", 1, "wall") as side,
        pytest.raises(SystemExit, match="ours ended with exit code 1"),
    ):
        side.step()
