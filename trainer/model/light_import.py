"""Imports open_clip without what a job does not need of it, so that its ranks start sooner.

open_clip imports all of these if they are installed. Afterwards each can be imported as usual.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator

from trainer.comm.backends import row_of
from trainer.config import Job
from trainer.model.catalog import read_config


def import_open_clip(job: Job | None) -> None:
    """Imports open_clip for a rank of the job.

    With None, for a job that cannot be read, it leaves out only what no job needs.
    """
    import_without(list(_unneeded(job)), "open_clip")


def _unneeded(job: Job | None) -> Iterator[str]:
    yield "wandb"  # for a function of timm that nobody calls: half a second
    if job is None:
        return
    if row_of(job).library != "horovod":
        yield "horovod"  # for a loss that is not ours
    names = [name for name in (job.model.name, job.model.teacher) if name]
    if job.model.text is None and all(map(_is_open_clips_own, names)):
        yield "transformers"  # half a second


def _is_open_clips_own(name: str) -> bool:
    """Returns whether a model is known to have no tower of transformers, and to write no captions with it."""
    config = read_config(name)
    text = config.get("text_cfg")
    return isinstance(text, dict) and "hf_model_name" not in text and "multimodal_cfg" not in config


def import_without(absent: Iterable[str], name: str) -> None:
    """Imports a module as if these packages were not installed, but for those that are imported already.

    The module must be able to do without them. Afterwards they can be imported as usual.
    """
    if name in sys.modules:
        return
    left_out = [package for package in absent if package not in sys.modules]
    sys.modules.update(dict.fromkeys(left_out))  # type: ignore[arg-type]
    try:
        importlib.import_module(name)
    finally:
        for package in left_out:
            del sys.modules[package]
