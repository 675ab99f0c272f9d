"""Imports what a table names, when it is needed."""

import importlib
from typing import Any


def load(name: str) -> Any:
    """Import "module:attribute" and return the attribute. Raises ImportError."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
