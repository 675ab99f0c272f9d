"""The folder that measures this project on a GPU machine without network, and the runner of its parts."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.gpu_cases import CASES
from benchmarks.gpu_check import Part, main, parts, run
from benchmarks.gpu_kit import BESIDE_TORCH, ROOTS, copy_sources, pinned
from benchmarks.gpu_kit import main as write_kit

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


@pytest.mark.parametrize(
    ("command", "limit_s", "end", "text"),
    [
        (("timeit", "-n", "1", "-r", "1", "print('a | b')"), 20, "done", "1 loop"),
        (("no_such_module",), 20, "failed (1)", "No module named no_such_module"),
        (("http.server", "0"), 0.2, "over 0 s", ""),
    ],
)
def test_a_part_ends_within_its_limit_and_says_how(
    tmp_path: Path, command: tuple[str, ...], limit_s: float, end: str, text: str
) -> None:
    row = run(Part("one", 1, command), limit_s, tmp_path)
    assert row.end == end
    assert text in row.text
    assert (tmp_path / "one.log").exists()


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


def test_what_does_not_fit_into_the_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_check.parts", lambda null: [printing("late")])
    done = CliRunner().invoke(main, ["--out", str(tmp_path), "--seconds", "3"])
    assert done.exit_code == 0
    assert "| late | not tried | 0 | no time left |" in (tmp_path / "summary.md").read_text()


def test_what_decides_comes_first_and_no_name_stands_twice() -> None:
    names = [part.name for part in parts(null=False)]
    assert len(set(names)) == len(names)
    assert set(CASES) < set(names)
    first = ("machine", "B-32", "B-32-compiled", "B-32-small-graphs", "B-32-torch", "run", "tests")
    assert sorted(first, key=names.index) == list(first)
