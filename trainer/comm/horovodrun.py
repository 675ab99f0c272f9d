"""horovodrun that ends with one line instead of a traceback of its own. `python -m trainer.comm.horovodrun` takes its arguments.

A process of its own, since the launcher half never imports Horovod. Which rank failed, and how, it loses: see the exit records.
"""

import sys

from horovod.runner.launch import run_commandline


def main() -> int:
    """Start the ranks and wait for them; 1 where any failed."""
    try:
        run_commandline()
    except RuntimeError as failure:
        print(f"horovodrun: {' '.join(str(failure).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
