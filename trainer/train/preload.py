"""Imports ahead of time what a rank of a job needs, for the nursery; see `trainer.supervise.prefork`.

It starts no thread, touches no GPU and opens no connection, since the process is forked afterwards.
"""

import importlib
from collections.abc import Sequence
from contextlib import suppress

from trainer.comm.backends import row_of
from trainer.data.processes import PRELOADED
from trainer.errors import InputError
from trainer.run.job_limits import job_of

_ALWAYS = ("trainer.train.main",)


def preload(arguments: Sequence[str]) -> None:
    """Imports the modules of a rank with the arguments JOB [--set KEY=VALUE ...].

    What cannot be imported or read is left to the rank, which says why.
    """
    names = [*_ALWAYS, *(name for name in PRELOADED if name != "__main__")]
    with suppress(InputError):
        job = job_of(arguments)
        names.append(row_of(job).implementation.partition(":")[0])
        names += ["torch.utils.tensorboard"] * job.logging.tensorboard
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
