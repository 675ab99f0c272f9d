"""Loads ahead of time what a rank of a job needs, for the fork server of `trainer.supervise.rank`.

It starts no thread, touches no GPU and opens no connection, since the process is forked afterwards.
"""

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from trainer.config import Job
from trainer.data.processes import PRELOADED
from trainer.model.light_import import import_open_clip
from trainer.run.job_limits import job_if_readable


def preload(arguments: Sequence[str]) -> None:
    """Loads the modules and tables of a rank with the arguments JOB [--set KEY=VALUE ...].

    What cannot be imported or read is left to the rank, which says why.
    """
    with _log_untouched():
        job = job_if_readable(arguments)
        import_open_clip(job)  # as in trainer.train.__main__
        if job is not None:
            for name in _modules(job):
                with suppress(ImportError):
                    importlib.import_module(name)
            _import_backend(job)
            _load_tables(job)
            _remember_versions()


@contextmanager
def _log_untouched() -> Iterator[None]:
    """Keeps a library that logs from setting up the log: the rank does that later."""
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _modules(job: Job) -> Iterator[str]:
    yield "trainer.train.main"
    yield from (name for name in PRELOADED if name != "__main__")
    if job.logging.tensorboard:
        yield "torch.utils.tensorboard"


def _import_backend(job: Job) -> None:
    from trainer.comm.connect import IMPLEMENTATIONS  # after `import_open_clip`: it imports torch

    with suppress(ImportError):
        IMPLEMENTATIONS[job.comm.backend]()


def _remember_versions() -> None:
    """Reads the versions and the hash of the code, which every rank compares with the others' later."""
    from trainer.sysinfo.versions import versions
    from trainer.train.same_environment import own_code_hash

    with suppress(Exception):  # of a package or a file that is missing; the rank finds it again
        versions()
        own_code_hash()


def _load_tables(job: Job) -> None:
    """Loads the formats of pictures and the words of the tokenizer."""
    from PIL import Image

    from trainer.model.build import preload_tokenizer

    Image.init()
    with suppress(Exception):  # of a config that is wrong; the rank finds it again and explains it
        preload_tokenizer(job)
