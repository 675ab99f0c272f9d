"""The command `clipship`, which answers to Ctrl-C also while its modules are still imported."""

import sys

_INTERRUPTED = 130
"""EXIT_INTERRUPTED of `trainer.errors`; this module imports nothing of ours before it listens."""


def main() -> int:
    """Runs the command line of this process; returns its exit code."""
    try:
        from trainer.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
