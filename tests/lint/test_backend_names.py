"""The table of backends is the only place that tells one backend from another."""

import ast
from pathlib import Path

import trainer
from trainer.comm.backends import BACKENDS

ROOT = Path(trainer.__path__[0])
MAY_COMPARE = (ROOT / "comm", ROOT / "config")


def comparisons(path: Path) -> list[int]:
    """Lines that compare something called a backend with a backend's name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            values = {constant.value for constant in ast.walk(node) if isinstance(constant, ast.Constant)}
            if "backend" in ast.unparse(node) and values & BACKENDS.keys():
                found.append(node.lineno)
    return found


def test_nobody_else_compares_a_backends_name() -> None:
    files = [
        path for path in ROOT.rglob("*.py") if not any(path.is_relative_to(folder) for folder in MAY_COMPARE)
    ]
    assert len(files) > 200
    assert {str(path): lines for path in files if (lines := comparisons(path))} == {}


def test_a_comparison_is_found(tmp_path: Path) -> None:
    file = tmp_path / "branch.py"
    file.write_text('if job.comm.backend != "horovod":\n    pass\n')
    assert comparisons(file) == [1]
