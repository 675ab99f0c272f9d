"""Docstrings are sentences that can be read without the name above them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"templates"}
"""Folders without this rule: trainer/templates holds templates."""
FRAGMENTS = ("Of", "What", "Where", "How", "Whether", "That")
"""First words that begin a fragment."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those of attributes too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def fragments(path: Path) -> list[int]:
    """Lines of the docstrings that are fragments."""
    return [line for line, text in docstrings(path) if text.split(maxsplit=1)[0].rstrip(",:") in FRAGMENTS]


@pytest.mark.parametrize(
    ("folder", "at_least"), [("trainer", 200), ("tests", 120), ("benchmarks", 8), ("tools", 5)]
)
def test_no_docstring_is_a_fragment(folder: str, at_least: int) -> None:
    files = [
        path for path in (ROOT / folder).rglob("*.py") if not LEFT_OUT & set(path.relative_to(ROOT).parts)
    ]
    assert len(files) > at_least
    broken = {str(path.relative_to(ROOT)): lines for path in files if (lines := fragments(path))}
    assert not broken, f"begin with a subject or a verb: {broken}"


def test_a_fragment_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Says it."""\n\nLIMIT_S = 1.0\n"""Of one step."""\n')
    assert fragments(file) == [4]
