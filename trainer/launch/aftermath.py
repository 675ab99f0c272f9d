"""Does after a run what its supervisors do at their end, where all of them were killed. Imports no torch."""

import asyncio
import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.run.layout import EXIT_FILE
from trainer.run.notify import Notifier
from trainer.sysinfo.signals import signal_name
from trainer.world import rank_process, state_folder
from trainer.world.state_folder import MEMORY

_BY_A_SIGNAL = 128


def record_killed(folder: Path, start: str, code: int, notifier: Notifier) -> ExitRecord | None:
    """Writes exit.json for a run of which nobody is left to say how it ended; returns the record.

    `code` is the launcher's. Returns None if it says nothing of a signal.
    """
    if not 0 < code - _BY_A_SIGNAL < signal.NSIG:
        return None
    reason = f"its supervisors were killed by {signal_name(code - _BY_A_SIGNAL)}, and none is left to say why"
    record = ExitRecord(0, os.uname().nodename, code, reason, time.time())
    asyncio.run(ExitFiles(str(folder), start, notifier=notifier).write(EXIT_FILE, asdict(record)))
    return record


def sweep_memory(memory: Path = MEMORY) -> None:
    """Removes what killed supervisors have left in this machine's memory; what is in use stays."""
    with suppress(OSError):
        for parent in {memory, Path(tempfile.gettempdir())}:
            rank_process.sweep(parent, memory)
        state_folder.sweep(memory)
