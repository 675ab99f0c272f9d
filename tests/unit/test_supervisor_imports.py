"""A supervisor stays light: every rank of every node has one."""

import subprocess
import sys


def test_supervisor_imports_neither_torch_nor_the_jobs_model() -> None:
    program = (
        "import sys, trainer.rank; "
        "print([name for name in ('torch', 'numpy', 'pydantic', 'click') if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
