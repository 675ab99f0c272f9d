"""The command `clipship`, which answers to Ctrl-C also while its modules are still imported."""

import atexit
import gc
import importlib
import sys
from types import ModuleType
from typing import Any

_INTERRUPTED = 130
"""EXIT_INTERRUPTED of `trainer.errors`; this module imports nothing of ours before it listens."""
_OBJECTS_BEFORE_COLLECTION = 100_000
"""Threshold of Python's garbage collector. The default of 700 suits programs that make garbage; a start makes
objects that stay, and scanning them again took 5 % of it."""


class _NoPlugins(ModuleType):
    """Stands for the module by which pydantic finds plugins: there are none.

    A job's meaning must not depend on plugins that happen to be installed. PYDANTIC_DISABLE_PLUGINS says so,
    too, but pydantic then still imports what reads the metadata of packages: a twelfth of a short command.
    """

    NAME = "pydantic.plugin._loader"

    @staticmethod
    def get_plugins() -> tuple[()]:
        return ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        del sys.modules[self.NAME]  # a release of pydantic that asks for something else gets its own module
        return getattr(importlib.import_module(self.NAME), name)


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    sys.modules.setdefault(_NoPlugins.NAME, _NoPlugins(_NoPlugins.NAME))
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
    atexit.register(gc.freeze)  # so that the collection at the interpreter's end finds nothing to scan
    try:
        from trainer.cli.main import main as run
        from trainer.sysinfo.signals import reset_inherited_signals

        reset_inherited_signals()
        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
