"""Imports what a table names, when it is needed."""

import importlib
import sys
from collections.abc import Iterable
from typing import Any


def load(name: str) -> Any:
    """Import "module:attribute" and return the attribute. Raises ImportError."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def import_without(absent: Iterable[str], name: str) -> None:
    """Imports a module as if these packages were not installed, but for those that are imported already.

    The module must be able to do without them. Afterwards they can be imported as usual.
    """
    if name in sys.modules:
        return
    left_out = [package for package in absent if package not in sys.modules]
    sys.modules.update(dict.fromkeys(left_out))  # type: ignore[arg-type]
    try:
        importlib.import_module(name)
    finally:
        for package in left_out:
            del sys.modules[package]
