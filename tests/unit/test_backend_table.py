"""The table of backends is the only place that tells one backend from another."""

import ast
from pathlib import Path

import pytest

import trainer
from tests.support.jobs import tiny_job
from trainer.comm.backends import BACKENDS, row_of
from trainer.config.comm import Backend
from trainer.launch.local import launcher_for

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


def test_every_backend_of_the_job_file_has_a_row() -> None:
    assert set(BACKENDS) == set(Backend.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_launcher_of_a_row_is_accepted_and_every_other_refused(name: str) -> None:
    job = tiny_job(comm={"backend": name})
    assert row_of(job).name == name
    for launcher in row_of(job).launchers:
        chosen = tiny_job(comm={"backend": name, "launcher": launcher})
        assert launcher_for(chosen.comm, several_hosts=False) == launcher
