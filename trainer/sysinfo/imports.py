"""Imports what a table names, when it is needed."""

import importlib
import sys
from typing import Any


def load(name: str) -> Any:
    """Import "module:attribute" and return the attribute. Raises ImportError."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def import_without(absent: str, name: str) -> None:
    """Imports a module as if the package `absent` were not installed, unless either is imported already.

    The module must be able to do without it. Afterwards the package can be imported as usual.
    """
    if absent in sys.modules or name in sys.modules:
        return
    sys.modules[absent] = None  # type: ignore[assignment]
    try:
        importlib.import_module(name)
    finally:
        del sys.modules[absent]
