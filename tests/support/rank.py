"""Begin and end of a test's program that a launcher starts as a rank, and what it tells the test."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.start import TOLD
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.world.launchers import detect


@contextmanager
def joined(job: Job) -> Iterator[Comm]:
    """Connects this process with the other ranks for the block, and ends it afterwards.

    It ends as a rank of the trainer: threads of communication libraries may outlive the interpreter.
    """
    comm = connect(job, detect(os.environ, os.uname().nodename), os.environ)
    yield comm
    comm.barrier(60.0)
    comm.close()
    sys.stdout.flush()
    os._exit(0)


def tell(value: Any) -> None:
    """Prints a value, in one write, so that lines of several ranks do not mix; see `tests.support.start`."""
    print(f"{TOLD}{json.dumps(value)}\n", end="", flush=True)
