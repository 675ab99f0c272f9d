"""Pages name files, names and layers that the code has."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {"cli.md", "job-file.md"}
PROSE = [
    *(ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md")),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in GENERATED),
]
"""Pages that people write."""
FILE = re.compile(r"`((?:trainer|tests|tools|benchmarks|docker|slurm|k8s|docs)/[\w./-]*)`")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\w*\))?`")
"""A name of the code or of a file, as a page has it."""


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    missing = [name for name in FILE.findall(page.read_text()) if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names files that are not there"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_prose_is_wrapped_at_100_columns(page: Path) -> None:
    wide = [line for line in page.read_text().splitlines() if len(line) > 100 and not line.startswith("|")]
    assert not wide


def test_the_drawing_has_the_layers_that_make_check_holds() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    drawing = (ROOT / "docs" / "architecture.md").read_text().split("```text\n")[1].split("```")[0]
    assert [re.split(r"\s{2,}", line)[0] for line in drawing.splitlines()] == layers


def test_every_name_that_extending_sends_to_is_in_the_code() -> None:
    names = set(NAME.findall((ROOT / "docs" / "extending.md").read_text()))
    code = {
        word
        for folder in ("trainer", "tests", "tools", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for word in re.findall(r"\w+", path.read_text())
    }
    gone = [name for name in names if not (ROOT / name).exists() and not code.issuperset(name.split("."))]
    assert len(names) > 50
    assert gone == []
