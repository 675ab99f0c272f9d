"""What torch.compile needs beside torch. Imports no torch."""

import os
import shutil
import sysconfig
from pathlib import Path

from trainer.errors import InputError
from trainer.job import Model


def check_compiler(settings: Model) -> None:
    """Raises InputError where blocks are to be compiled and this machine has no C++ compiler, or no headers of Python, to do it with."""
    if not settings.compile:
        return
    name = os.environ.get("CXX") or "g++"  # as torch chooses it
    header = Path(sysconfig.get_path("include")) / "Python.h"
    lacking = [
        *([f"a C++ compiler ({name})"] if shutil.which(name.split()[0]) is None else []),
        *([f"Python's headers ({header})"] if not header.is_file() else []),
    ]
    if lacking:
        raise InputError(
            f"model.compile needs {' and '.join(lacking)} on every node: install g++ and python3-dev there, "
            "or set model.compile to false; an image built from a job with model.compile has them"
        )
