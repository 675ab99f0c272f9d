"""How a rank speaks to people and how it leaves: the same for training and for evaluation. No torch."""

import logging
import os
import sys
from typing import NoReturn, TextIO

from trainer.world import World


def speak(world: World, stream: TextIO) -> None:
    """Rank 0's log goes to the stream; of the others only errors do, to stderr. Log files, opened later, have all of it."""
    handler = logging.StreamHandler(stream if world.rank == 0 else sys.stderr)
    handler.setLevel(logging.INFO if world.rank == 0 else logging.ERROR)
    handler.addFilter(lambda record: record.name == "clipship" or record.levelno >= logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    logging.captureWarnings(True)


def leave_now(exit_code: int) -> NoReturn:
    """End the process without the interpreter's clean-up, which may wait for other ranks, or abort on a library's threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
