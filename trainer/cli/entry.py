"""The command `clipship`, which answers to Ctrl-C also while its modules are still imported."""

import atexit
import gc
import io
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
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":  # stderr never is
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from trainer.cli.main import main as run
        from trainer.sysinfo.signals import reset_inherited_signals

        reset_inherited_signals()
        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
