"""Checks that torch.compile has what it needs besides torch. Imports no torch."""

import os
import shutil
import sysconfig
from pathlib import Path

from trainer.config import Model
from trainer.errors import InputError


def check_compiler(settings: Model) -> None:
    """Raises InputError if blocks are to be compiled and this machine cannot do it.

    It then has no C++ compiler or no headers of Python.
    """
    if settings.compile and (lacking := missing_parts()):
        raise InputError(
            f"model.compile needs {' and '.join(lacking)} on every node: install g++ and python3-dev there, "
            "or set model.compile to false; an image built from a job with model.compile has them"
        )


def missing_parts() -> list[str]:
    """Returns what this machine lacks for torch.compile, in words; empty if nothing."""
    name = os.environ.get("CXX") or "g++"  # the same choice as torch's
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return [
        *([f"a C++ compiler ({name})"] if shutil.which(name.split()[0]) is None else []),
        *([f"Python's headers ({header})"] if not header.is_file() else []),
    ]
