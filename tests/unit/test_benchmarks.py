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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks import gpu as gpu_benchmark
from benchmarks import step as benchmark
from benchmarks.goodput_faults import EVERY_S, EXTRA_KINDS, FAULTS, KINDS, OF_NODES, Fault, deal, made
from benchmarks.goodput_figures import samples
from benchmarks.goodput_limits import LIMITS, missed
from benchmarks.goodput_nodes import Nodes
from benchmarks.goodput_run import _COMMIT
from benchmarks.goodput_sides import BATCH, Ours
from benchmarks.goodput_story import Moment, Seen, Story
from benchmarks.gpu_cases import Skipped
from benchmarks.gpu_changes import CHANGES
from benchmarks.gpu_check import Part, main
from benchmarks.gpu_kit import BESIDE_TORCH, ROOTS, copy_sources, pinned
from benchmarks.gpu_kit import main as write_kit
from benchmarks.learning import Learned, difference, recalls, seconds_to, summary
from benchmarks.learning_data import Concept, check_sum, training_samples
from benchmarks.start import Watched
from trainer.config.gpus import gpu_named

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


# What measures this project on a GPU: the benchmark, and the folder for a machine without network.

ROOT = Path(__file__).parents[2]


def test_the_kit_has_what_its_packages_need_and_nothing_that_a_torch_brings() -> None:
    names = {pin.partition("==")[0] for pin in pinned(ROOTS)}
    assert {*ROOTS, "pydantic-core", "huggingface-hub", "tokenizers"} <= names
    assert not names & BESIDE_TORCH
    assert not any(name.startswith(("nvidia-cu", "nvidia-nccl", "cuda-")) for name in names)
    assert "scipy" not in {pin.partition("==")[0] for pin in pinned(ROOTS, frozenset({"scipy"}))}


def test_the_kit_has_the_sources_with_their_links(tmp_path: Path) -> None:
    assert copy_sources(ROOT, tmp_path) > 500
    assert (tmp_path / "trainer/templates/slurm").is_symlink()
    assert (tmp_path / "trainer/templates/slurm").is_dir()
    assert (tmp_path / "benchmarks/gpu_check.py").is_file()


def test_a_folder_that_is_no_kit_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    done = CliRunner().invoke(write_kit, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "is no kit" in done.output
    assert (tmp_path / "thesis.tex").exists()


def printing(name: str, *lines: str, least_gpus: int = 1) -> Part:
    command = ("timeit", "-n1", "-r1", "-s", f"print({chr(10).join(lines)!r}); import os; os._exit(0)")
    return Part(name, 20, command, least_gpus)


def test_the_summary_has_a_row_for_each_part_and_json_in_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def case(name: str, samples_s: int) -> Part:
        found = json.dumps({"cases": {name: {"ours_samples_s": samples_s}}})
        return printing(name, f"{name}  {samples_s} samples/s", found)

    chosen = [
        case("B-32", 100),
        Part("bad", 9, ("no_such_module",)),
        printing("varlen", json.dumps({"skipped": "a | b is not in this torch"})),
        case("B-32-compiled", 90),
        printing("ranks", least_gpus=99),
    ]
    monkeypatch.setattr("benchmarks.gpu_check.parts", lambda null: chosen)
    done = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert str(done.exception) == "failed or not over: bad"
    table = (tmp_path / "summary.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:7]]
    assert [(name, end, text) for name, end, _, text in rows] == [
        ("B-32", "done", "100 samples/s"),
        ("bad", "failed (1)", f"{sys.executable}: No module named no_such_module"),
        ("varlen", "not tried", "a / b is not in this torch"),
        ("B-32-compiled", "done", "0.900 times the speed of B-32: 90 samples/s"),
        ("ranks", "not tried", "it needs 99 GPUs"),
    ]
    found = json.loads(table[-1])["parts"]
    assert found["B-32-compiled"]["found"] == {"ours_samples_s": 90, "share": 0.9}


def test_only_gpus_of_the_table_have_a_peak() -> None:
    for name, row in {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA GB200": "GB200", "NVIDIA H20": "H20",
        "NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA A100-SXM4-80GB": "A100-80GB", "NVIDIA L20": "L20",
        "NVIDIA GeForce RTX 4090": "RTX-4090", "NVIDIA A800-SXM4-80GB": "A800-80GB", "NVIDIA H800": "H800",
        "NVIDIA B300 SXM6 AC": "B300", "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
        "NVIDIA H100 PCIe": None, "NVIDIA GH200 480GB": None, "Null GPU": None,
    }.items():  # fmt: skip
        found = gpu_named(name)
        assert (found and found.name) == row


def test_a_torch_without_varlen_attn_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(Skipped, match="varlen_attn is not in this torch"):
        CHANGES["varlen"]()


def test_without_a_gpu_it_says_so_and_ends_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_benchmark, "probe", lambda: None)
    result = CliRunner().invoke(gpu_benchmark.main, [])
    assert result.exit_code == 0
    first, last = result.stdout.strip().splitlines()
    assert first == "torch sees no GPU on this machine: the benchmark of the step was not run"
    assert json.loads(last) == {"benchmark": "gpu", "skipped": "torch sees no GPU"}


# The figures of `make bench-goodput`: which faults it draws, and what it makes of what it saw.


def kinds(faults: Sequence[Fault]) -> list[str]:
    return [fault.kind for fault in faults]


def test_each_run_has_a_fault_of_a_node_and_one_of_a_rank_and_both_runs_every_kind_once() -> None:
    for seed in range(50):
        for minutes, runs in ((1, 1), (3, 2), (FAULTS, 1), (40, 2)):
            for hand in deal(seed, minutes, runs):
                assert {kind in OF_NODES for kind in kinds(hand)} == {True, False}
        hands = deal(seed, FAULTS, 2)  # one fault in a minute
        assert Counter(kind for hand in hands for kind in kinds(hand)) == dict.fromkeys(KINDS, 1)
        for hand in hands:
            number = made(kinds(hand))
            assert number in (FAULTS // 2, FAULTS // 2 + 1)
            assert [fault.at_s for fault in hand] == sorted(fault.at_s for fault in hand)
            assert hand[-1].at_s < (number - 0.4) * EVERY_S, "the run is still under way then"
    assert deal(1, 20, 2) == deal(1, 20, 2) != deal(2, 20, 2)


def test_every_kind_can_be_made() -> None:
    assert _COMMIT.keys() == {*KINDS, *EXTRA_KINDS}


def story(*seen: tuple[float, int, int, int]) -> Story:
    return Story(seen=[Seen(*each) for each in seen])


@pytest.mark.parametrize(
    ("seen", "recovery_s"),
    [
        # Step 4 is recorded after the kill, step 4 comes again, and step 5 is new.
        (((1, 1, 1, 3), (2.1, 1, 1, 4), (6, 1, 2, 4), (7, 1, 2, 5), (8, 1, 2, 6)), 5.0),
        # The run was started again, and counts its generations anew.
        (((1, 1, 2, 30), (60, 2, 1, 30), (61, 2, 1, 31)), 59.0),
        # Another fault came in the recovery.
        (((1, 1, 1, 3), (9, 1, 3, 4)), 7.0),
        (((1, 1, 1, 3), (2.5, 1, 1, 4)), None),
    ],
    ids=["new ranks", "started again", "twice", "never"],
)
def test_recovery_ends_with_the_first_new_step_of_new_ranks(
    seen: tuple[tuple[float, int, int, int], ...], recovery_s: float | None
) -> None:
    assert story(*seen).recovery_s(Moment(2.0, "rank killed", False)) == recovery_s


GOOD = {
    name: limit.most if limit.least is None else limit.least for name, limit in LIMITS.items()
}  # each figure just at its limit


@pytest.mark.parametrize("name", LIMITS)
def test_figure_beyond_its_limit_is_named_with_the_limit(name: str) -> None:
    assert not list(missed("torch", GOOD))
    bound = float(GOOD[name] or 0)
    worse = bound - 0.01 if LIMITS[name].least is not None else bound + 1.0
    (sentence,) = missed("torch", {**GOOD, name: worse})
    assert sentence.startswith(f"torch: {name} is {worse:g}")
    assert "must be" in sentence
    (sentence,) = missed("horovod", {**GOOD, name: None})
    assert sentence.startswith(f"horovod: {name} is not known")


def side(folder: Path, steps: list[tuple[int, float]]) -> Ours:
    """A run of three steps that recorded these steps and losses."""
    folder.mkdir()
    job = folder / "job.toml"
    job.write_text("epochs = 1\n")
    made = Ours(Nodes(folder, "token"), folder, 3, job, "torch")
    made.run_folder.mkdir(parents=True)
    records = [{"step": step, "samples": step * BATCH, "loss": loss} for step, loss in steps]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (made.run_folder / "metrics.jsonl").write_text(text)
    return made


@pytest.mark.parametrize(
    ("steps", "lost", "twice"),
    [
        ([(1, 0.3), (2, 0.2), (3, 0.1)], 0, 0),
        ([(1, 0.3), (3, 0.1)], 1, 0),
        ([(1, 0.3), (2, 0.2), (2, 0.2), (3, 0.1)], 0, 1),
        ([(1, 0.3), (2, 0.25), (3, 0.1)], 1, 0),
    ],
    ids=["as it should be", "a step is missing", "a step twice", "a step on other samples"],
)
def test_samples_are_counted_by_position_and_loss(
    tmp_path: Path, steps: list[tuple[int, float]], lost: int, twice: int
) -> None:
    whole = side(tmp_path / "whole", [(1, 0.3), (2, 0.2), (3, 0.1)])
    assert samples(side(tmp_path / "ours", steps), whole) == (lost * BATCH, twice * BATCH)


def test_last_step_is_that_of_the_newest_record(tmp_path: Path) -> None:
    run = side(tmp_path / "one", [(1, 0.3), (2, 0.2)])
    assert (tmp_path / "one" / "one.toml").read_text() == "steps = 3\n", "as long as it is asked to be"
    with open(run.run_folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "generation": 2, "loss": 0.1}\n{"step": 4, "lo')
    assert run.last_step() == (2, 3)
