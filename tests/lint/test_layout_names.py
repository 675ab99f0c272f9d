"""The run folder's names are spelled in trainer/run/layout.py and nowhere else."""

import ast
from pathlib import Path

import trainer
from trainer.run import layout

ROOT = Path(trainer.__path__[0])
NAMES = {value for name, value in vars(layout).items() if name.isupper() and isinstance(value, str)}
DISTINCT = {name for name in NAMES if "." in name or "-" in name} - {layout.JOB_FILE}
"""Names that mean nothing else. `job.toml` is also what users call a job file of their own."""


def spelled(path: Path) -> set[str]:
    """Returns the names of the run folder that stand in a file.

    Distinct names count anywhere, the others only where a path is built from them.
    """
    found = set()
    tree = ast.parse(path.read_text())
    formatted = {
        part for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for part in ast.walk(text)
    }
    for node in ast.walk(tree):
        parts = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = [node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Path":
            parts = list(node.args)
        found |= {part.value for part in parts if isinstance(part, ast.Constant) and part.value in NAMES}
        if isinstance(node, ast.Constant) and node.value in DISTINCT and node not in formatted:
            found.add(node.value)
    return {str(name) for name in found}


def test_names_are_spelled_once() -> None:
    apart = (
        Path(layout.__file__),
        ROOT / "templates",
        ROOT / "config",
    )  # messages on job files name job.toml
    others = [path for path in ROOT.rglob("*.py") if not any(path.is_relative_to(part) for part in apart)]
    assert len(others) > 200
    assert {str(path.relative_to(ROOT)): names for path in others if (names := spelled(path))} == {}


def test_a_name_that_is_spelled_again_is_found(tmp_path: Path) -> None:
    file = tmp_path / "again.py"
    file.write_text('EXIT = "exit.json"\nlogs = folder / "logs"\n')
    assert spelled(file) == {"exit.json", "logs"}
