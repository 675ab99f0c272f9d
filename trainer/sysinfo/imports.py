"""Imports a module without some of the packages that it can do without."""

import importlib
import sys
from collections.abc import Iterable


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
