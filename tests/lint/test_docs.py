"""Pages of docs/ name files that exist and the layers that make check holds."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROSE = [page for page in PAGES if page.name not in ("cli.md", "job-file.md")]
"""Pages that people write."""
FILE = re.compile(r"`((?:trainer|tests|docker|slurm|k8s|docs)/[\w./-]*)`")


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    missing = [name for name in FILE.findall(page.read_text()) if not (ROOT / name).exists()]
    assert not missing, f"{page.name} names files that are not there"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_prose_is_wrapped_at_100_columns(page: Path) -> None:
    wide = [line for line in page.read_text().splitlines() if len(line) > 100 and not line.startswith("|")]
    assert not wide


def test_the_first_page_names_each_other() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert [
        page.name for page in PAGES[1:] if f"]({page.name})" not in index and page.name != "index.md"
    ] == []


def test_the_drawing_has_the_layers_that_make_check_holds() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    drawing = (ROOT / "docs" / "architecture.md").read_text().split("```text\n")[1].split("```")[0]
    assert [re.split(r"\s{2,}", line)[0] for line in drawing.splitlines()] == layers


def test_names_of_tables_that_extending_sends_to_are_there() -> None:
    places = {
        "trainer/model/loss.py": "SHARES",
        "trainer/world/launchers.py": "ROWS",
        "trainer/launch/local.py": "_COMMANDS",
        "trainer/config/schedulers.py": "SCHEDULERS",
        "trainer/comm/backends.py": "BackendRow",
        "trainer/launch/submission.py": "class Scheduler(ABC)",
        "trainer/launch/schedulers.py": "IMPLEMENTATIONS",
        "trainer/config/sections.py": "SECTIONS",
        "trainer/comm/connect.py": "IMPLEMENTATIONS",
        "trainer/config/keys.py": "MAY_CHANGE",
    }
    assert [path for path, name in places.items() if name not in (ROOT / path).read_text()] == []


def test_the_workflow_and_ci_build_the_documents() -> None:
    assert "make docs" in (ROOT / ".github" / "workflows" / "check.yml").read_text()
    assert "step docs make docs" in (ROOT / ".ci" / "run").read_text()
