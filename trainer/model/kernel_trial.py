"""Decides, at each start, whether functions that a compiler makes may take the place of plain ones."""

from collections.abc import Callable
from importlib.util import find_spec

import torch

from trainer.model.host_compiler import missing_parts


def lacking() -> str:
    """Returns, in words, what this node lacks to compile for its GPU; empty if it has all."""
    parts = [*missing_parts(), *([] if find_spec("triton") else ["Triton"])]
    return f"this node lacks {' and '.join(parts)}" if parts else ""


def problem_of(compiler: str, difference: Callable[[], str]) -> str:
    """Returns, in words, why the functions of a compiler cannot serve; empty if they can.

    `difference` runs them and the plain ones on the same small tensors, and returns what differs, or nothing.
    """
    try:
        with torch.no_grad():
            return difference()
    except Exception as error:  # a compiler can fail in any way, and the plain form is there
        return f"{compiler} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
