"""Tells a model and its weights from others, for what is kept of them between starts. Imports no torch."""

import os
from contextlib import suppress
from pathlib import Path

from trainer.config import Job
from trainer.config.resume_rule import may_change_keys
from trainer.run.checkpoints import MANIFEST
from trainer.safe_io.plain import read_json


def model_identity(job: Job) -> list[object]:
    """Returns what the features of a job's model depend on, and what no run may change while it trains it."""
    free = {key.removeprefix("model.") for key in may_change_keys() if key.startswith("model.")}
    settings = job.model.model_dump(mode="json", exclude={"name", "pretrained", *free})
    return [settings, model_text(job), weights_identity(job)]


def model_text(job: Job) -> str:
    """Returns what names the model: its name, or the content of its config file."""
    name = job.model.name
    return Path(name).read_text(encoding="utf-8") if name.endswith(".json") else name


def weights_identity(job: Job) -> object:
    """Returns what tells the weights from others.

    It is the checksum of Clipship's checkpoint; of another file its path, size and time of change; else
    open_clip's tag.
    """
    weights = Path(job.model.pretrained or "")
    if not job.model.pretrained or not weights.is_file():
        return job.model.pretrained
    with suppress(OSError, ValueError, KeyError, TypeError):
        return read_json(weights.parent / MANIFEST, links=True)["files"][weights.name]
    status = weights.stat()
    return [os.fsencode(weights.resolve()).hex(), status.st_size, status.st_mtime_ns]
