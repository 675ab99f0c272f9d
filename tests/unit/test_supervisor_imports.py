"""A supervisor stays light, and what starts it again under srun: every rank of every node has them."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["trainer.rank", "trainer.supervise.main", "trainer.launch.ranks.respawn"])
def test_supervisor_imports_neither_torch_nor_the_jobs_model(module: str) -> None:
    program = (
        f"import sys, {module}; "
        "print([name for name in ('torch', 'numpy', 'pydantic', 'click') if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
