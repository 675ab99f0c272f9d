"""The folder that measures this project on a GPU machine without network, and the runner of its parts."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.gpu_check import Part, main, run
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
    ("command", "code", "told"),
    [
        (("timeit", "-n", "1", "-r", "1"), 0, "exit code 0"),
        (("no_such_module",), 1, "exit code 1"),
        (("http.server", "0"), None, "past its limit"),
    ],
)
def test_a_part_ends_within_its_limit_and_says_how(
    tmp_path: Path, command: tuple[str, ...], code: int | None, told: str
) -> None:
    found, text = run(Part("one", 1, command, 3), 20 if code is not None else 0.2, tmp_path)
    assert found == code
    assert f"## one: {told}" in text
    assert (tmp_path / "one.log").exists()


def test_a_part_that_fails_is_named_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_check.parts", lambda null: [Part("bad", 9, ("no_such_module",), 3)])
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    done = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "failed or not over: bad" in str(done.exception) + done.output
