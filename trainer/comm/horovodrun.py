"""horovodrun that ends with one line instead of a traceback of its own. `python -m trainer.comm.horovodrun` takes its arguments.

A process of its own, since the launcher half never imports Horovod. Which rank failed, and how, it loses: see the exit records.
"""

import sys

import psutil
from horovod.runner.launch import run_commandline


def main() -> int:
    """Start the ranks and wait for them; 1 where any failed."""
    try:
        run_commandline()
    except RuntimeError as failure:
        print(f"horovodrun: {' '.join(str(failure).split())}", file=sys.stderr)
        return 1
    except KeyError as failure:
        if failure.args[0] in psutil.net_if_addrs():
            raise
        lacking = f"this machine has no network interface {failure.args[0]}, over which the hosts reach each other"
        print(f"horovodrun: {lacking}: start the run on one of them, or use comm.launcher = mpirun", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
