"""The table of goals in docs/performance.md says of each figure truly whether it reaches its goal."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "performance.md").read_text(encoding="utf-8")
_SECTION = PAGE.split("## Goals")[1].split("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in _SECTION.splitlines()
    if line.startswith("|")
][2:]
NEEDED = {"below": "<", "at most": "<=", "at least": ">="}


def number(text: str) -> float:
    """The first number of a cell."""
    match = re.search(r"[\d,]+(?:\.\d+)?", text)
    assert match is not None, text
    return float(match[0].replace(",", ""))


def cells_of(name: str, heading: str) -> list[str]:
    """Cells of the row of that name in the table that has the heading."""
    table = PAGE.split(f"| {heading} |")[1].split("\n\n")[0]
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_figure_reaches_its_goal_if_the_table_says_so_and_has_a_reason_if_not(row: list[str]) -> None:
    _, _, now, goal, reached = row
    (words,) = (words for words in NEEDED if goal.startswith(words))
    found, limit = number(now), number(goal)
    is_reached = {"<": found < limit, "<=": found <= limit, ">=": found >= limit}[NEEDED[words]]
    assert reached.startswith("yes" if is_reached else "no: ")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_figure_is_that_of_the_other_tables(row: list[str]) -> None:
    what, before, now, goal, _ = row
    if what.startswith("peak, "):
        cells = cells_of(what.removeprefix("peak, ").removesuffix(", GiB"), "peak memory, GiB")
        assert cells == [before, now, goal.removeprefix("below ")]
    elif what.startswith("a step moves, "):
        name = what.removeprefix("a step moves, ").removesuffix(", GiB")
        assert cells_of(name, "GiB that operators read and write")[:2] == [before, now]
    elif what.startswith("launches / open_clip_train's, "):
        name = what.removeprefix("launches / open_clip_train's, ")
        *ours, theirs = map(number, cells_of(name, "launches of kernels + calls of libraries"))
        assert [f"{launches / theirs:.2f}" for launches in ours] == [before, now]


def test_timed_figures_are_those_of_testing_md() -> None:
    lines = (DOCS / "testing.md").read_text(encoding="utf-8").splitlines()
    timed = [row for row in ROWS if row[0].startswith(("step on", "loader"))]
    for name, figures in (("bench-step", timed[:2]), ("bench-data", timed[2:])):
        (line,) = (line for line in lines if line.startswith(f"| `{name}` |"))
        said = [float(text) for text in re.findall(r"\d\.\d+", line.split("|")[2])]
        assert said == [number(row[2]) for row in figures]
