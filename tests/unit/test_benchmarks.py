"""Parts of benchmarks that need no network: what is held out, the order of turns, figures, their end."""

import hashlib
import importlib.util
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks import step as benchmark
from benchmarks.learning import Learned, difference, recalls, seconds_to, summary
from benchmarks.learning_data import Concept, check_sum, training_samples
from benchmarks.start import Watched

# make bench-learning

CAT = Concept(
    "1f431", {"en": "cat", "zh": "猫"}, {"en": ["pet", "cat", "face", "kitty", "fur"], "zh": ["宠物"]}
)
SUN = Concept("2600", {"en": "sun", "zh": "太阳"}, {"en": [], "zh": ["天气", "热"]})


def test_training_sees_every_style_but_the_one_held_out(tmp_path: Path) -> None:
    for style in ("a", "b", "held"):
        for each in (CAT, SUN):
            Image.new("RGB", (2, 2)).save(tmp_path / f"{style}-{each.code}.png")
    samples = list(training_samples([CAT, SUN], ["a", "b"], tmp_path))
    names = [f"{style}-{code}" for style in "ab" for code in ("1f431", "2600")]
    assert sorted(key for key, _ in samples) == [
        f"{name}-{language}" for name in names for language in ("en", "zh")
    ]
    captions = [dict(samples)[f"{style}-1f431-en"]["txt"].decode() for style in "ab"]
    assert captions == ["cat, pet, kitty", "cat, face, fur"]
    assert Image.open(io.BytesIO(dict(samples)["b-2600-en"]["png"])).size == (2, 2)


def test_an_archive_that_is_not_the_pinned_one_is_removed(tmp_path: Path) -> None:
    archive = tmp_path / "noto.tgz"
    archive.write_bytes(b"pictures")
    check_sum(archive, hashlib.sha256(b"pictures").hexdigest())
    with pytest.raises(SystemExit, match="it was removed"):
        check_sum(archive, hashlib.sha256(b"others").hexdigest())
    assert not archive.exists()


def test_recall_is_the_share_of_names_that_find_their_picture() -> None:
    assert recalls({"en": [0, 1, 4, 5]}) == {"en_r1": 0.25, "en_r5": 0.75}


def test_a_difference_has_the_error_of_a_sample_of_names() -> None:
    """One finds m more of n names: the mean is m/n, and the variance m/n (1 - m/n) n/(n - 1)."""
    n, more = 400, 40
    mine = {"en": [0] * n, "zh": [0] * n}
    yours = {language: [7] * more + [0] * (n - more) for language in mine}
    gain, error = difference([mine, mine], [yours, yours])
    share = more / n
    assert gain == pytest.approx(share)
    assert error == pytest.approx(2 * math.sqrt(share * (1 - share) / (n - 1)))
    assert difference([yours], [mine])[0] == pytest.approx(-share)


def test_a_difference_within_its_error_is_too_small_to_show() -> None:
    def learned(seconds: float, found: int) -> Learned:
        return Learned(seconds, {"en": [0] * found + [9] * (100 - found)})

    ours = [learned(10, 20), learned(20, 40)]
    shown = summary(("ours", "theirs"), [[ours, [learned(30, 39)]]])
    assert shown["shows"] == "too small to show"
    assert shown["ours_s_to_theirs_r1"] == 19.5
    assert (shown["chance_r1"], shown["chance_r5"]) == (0.01, 0.05)
    assert summary(("ours", "theirs"), [[ours, [learned(30, 10)]]])["shows"] == "ours"
    worse = summary(("ours", "theirs"), [[ours, [learned(30, 80)]]])
    assert (worse["shows"], worse["ours_s_to_theirs_r1"]) == ("theirs", None)
    assert seconds_to([learned(10, 0)], 0.0) == 10


# make bench-step


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


# make bench-start


def test_processes_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    """torchrun starts its ranks like that."""
    run = Watched(["sh", "-c", "setsid sleep 300 & echo $!; wait"], tmp_path, os.environ)
    run.wait(lambda: bool(run.lines))
    child = Path("/proc", run.lines[0][1], "cmdline")
    while not child.read_bytes().startswith(b"sleep"):  # then it is in its own session
        time.sleep(0.01)
    run.kill()
    run.wait(run.has_ended)
    limit = time.monotonic() + 30
    while child.exists() and child.read_bytes():  # its parent may take note of it a little later
        assert time.monotonic() < limit, "it lives"
        time.sleep(0.1)
