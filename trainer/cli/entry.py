"""The command `clipship`, which answers to Ctrl-C also while its modules are still imported."""

import atexit
import gc
import os
import sys

_INTERRUPTED = 130
"""EXIT_INTERRUPTED of `trainer.errors`; this module imports nothing of ours before it listens."""
_OBJECTS_BEFORE_COLLECTION = 100_000
"""Threshold of Python's garbage collector. The default of 700 suits programs that make garbage; a start makes
objects that stay, and scanning them again took 5 % of it."""


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"  # a job means the same, whatever is installed
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
    atexit.register(gc.freeze)  # so that the collection at the interpreter's end finds nothing to scan
    try:
        from trainer.cli.main import main as run
        from trainer.sysinfo.signals import reset_inherited_signals
        from trainer.sysinfo.streams import outlive_readers, use_streams

        use_streams()
        outlive_readers()
        reset_inherited_signals()
        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
