"""Starts a rank's module: `python -m trainer.supervise.rank_start MODULE [WORD ...]`.

Before it imports the module, it lets the supervisor ask for the stack, so that an import that hangs on a slow
file system shows where. It imports no torch itself.
"""

import faulthandler
import os
import runpy
import sys
from pathlib import Path

from trainer.run.exit_record import RANK_DIR
from trainer.supervise.rank_report import STACK_FILE, STACK_SIGNAL


def main() -> None:
    """Prepare the dump of this process's stack, then run the module that the arguments name."""
    # The file stays open as long as the process lives.
    file = open(Path(os.environ[RANK_DIR], STACK_FILE), "a")  # noqa: SIM115
    faulthandler.enable(file)
    faulthandler.register(STACK_SIGNAL, file=file)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
