"""What measures this project on a GPU: the benchmark, and the folder for a machine without network."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import gpu as benchmark
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
