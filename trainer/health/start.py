"""How a supervisor starts its rank: `python -m trainer.health.start MODULE [WORD ...]` can be asked for its stack from the first line on.

Before the module is imported: an import that hangs on a slow file system shows where. No torch of its own.
"""

import faulthandler
import os
import runpy
import sys
from pathlib import Path

from trainer.health.evidence import STACK_FILE, STACK_SIGNAL
from trainer.health.pulse import RANK_DIR


def main() -> None:
    file = open(Path(os.environ[RANK_DIR], STACK_FILE), "a")  # noqa: SIM115  # open as long as the process lives
    faulthandler.enable(file)
    faulthandler.register(STACK_SIGNAL, file=file)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
