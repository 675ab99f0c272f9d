"""What measures this project on a GPU: the benchmark, and the folder for a machine without network."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import gpu as benchmark
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
from trainer.config.gpus import gpu_named

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
    monkeypatch.setattr(benchmark, "probe", lambda: None)
    result = CliRunner().invoke(benchmark.main, [])
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
