"""Starts a rank's module: `python -m trainer.supervise.rank.rank_start MODULE [WORD ...]`.

Before it imports the module, it lets the supervisor ask for the stack, so that an import that hangs on a slow
file system shows where. If the supervisor asks for a nursery, ranks of later generations begin here too. It
imports no torch itself.
"""

import faulthandler
import importlib
import os
import runpy
import sys
from pathlib import Path

from trainer.run.exit_record import RANK_DIR
from trainer.supervise.rank.prefork import leave_nursery
from trainer.supervise.rank.rank_report import STACK_FILE, STACK_SIGNAL
from trainer.sysinfo.signals import reset_inherited_signals

_PRELOAD = "trainer.train.preload"


def main() -> None:
    """Prepare the dump of this process's stack, then run the module that the arguments name."""
    reset_inherited_signals(asks=False)
    _prepare_dump()
    sys.argv = sys.argv[1:]
    if leave_nursery(_preload):
        _prepare_dump()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _prepare_dump() -> None:
    if folder := os.environ.get(RANK_DIR):  # a nursery that was started without a rank has none
        # The file stays open as long as the process lives.
        file = open(Path(folder, STACK_FILE), "a")  # noqa: SIM115
        faulthandler.enable(file)
        faulthandler.register(STACK_SIGNAL, file=file)


def _preload() -> None:
    # The layer of the training is above this one, which therefore does not import it by name.
    importlib.import_module(_PRELOAD).preload(sys.argv[1:])


if __name__ == "__main__":
    main()
