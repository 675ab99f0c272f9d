"""Messages count with `many`: no text says "1 ranks"."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT

NOUNS = (
    *("bytes", "cores", "epochs", "faults", "files", "folders", "generations", "gpus", "hosts", "images"),
    *("lines", "minutes", "nodes", "packages", "pods", "processes", "ranks", "restarts"),
    *("rows", "samples", "seconds", "shards", "spares", "steps", "streams", "tables"),
    *("variables", "wheels", "workers", "differences", "characters", "checkpoints", "classes"),
)
COUNTED = re.compile(rf"\s(?:{'|'.join(NOUNS)})\b(?![/=.-])", re.IGNORECASE)
OF_ALL = re.compile(r"\b(?:of|the|all|its)(?: the)? $")
"""Words before a number of many, of which the text names a part, or that is known to be above one."""


OF_LOGS = re.compile(rf"(?<!of )%d (?:{'|'.join(NOUNS)})\b(?![/=.-])", re.IGNORECASE)


def is_constant(value: ast.expr) -> bool:
    """Returns whether the number is a constant of the program, which its author knows to be above one."""
    names = re.findall(r"[A-Za-z_]\w*", ast.unparse(value))
    return all(name.lstrip("_").isupper() for name in names)


def bare_counts(path: Path) -> list[int]:
    """Lines with a number before a plural that is right for every number but one."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    lines = [
        node.lineno for node in nodes if isinstance(node, ast.Constant) and OF_LOGS.search(str(node.value))
    ]
    for text in (node for node in nodes if isinstance(node, ast.JoinedStr)):
        for place, part in enumerate(text.values[:-1]):
            after = text.values[place + 1]
            before = text.values[place - 1] if place else None
            if (
                isinstance(part, ast.FormattedValue)
                and isinstance(after, ast.Constant)
                and COUNTED.match(str(after.value))
                and "." not in ast.unparse(part.format_spec or ast.Constant(""))  # parts of one, such as 1.0
                and not is_constant(part.value)
                and not (isinstance(before, ast.Constant) and OF_ALL.search(str(before.value)))
            ):
                lines.append(part.lineno)
    return lines


def test_every_number_that_may_be_one_is_counted_with_many() -> None:
    files = [path for folder in ("trainer", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := bare_counts(path))} == {}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('f"{n} ranks on {m:,} nodes"', 2),
        ("f\"{many(n, 'rank')} on the {m} nodes\"", 0),
        ('f"{n} of {m} ranks"', 0),
        ('f"{MOST} files, {s:.0f} samples/s"', 0),
        ('"%d of %d ranks, %d samples"', 1),
    ],
)
def test_a_bare_count_is_found(tmp_path: Path, line: str, found: int) -> None:
    file = tmp_path / "messages.py"
    file.write_text(f"text = {line}\n")
    assert len(bare_counts(file)) == found
