"""Tells a model and its weights from others, for what is kept of them between starts. Imports no torch."""

import os
from contextlib import suppress
from pathlib import Path

from trainer.config import Job
from trainer.config.resume_rule import may_change_keys
from trainer.run.checkpoints import MANIFEST
from trainer.safe_io.plain import read_json

_COUNTED_ALWAYS = frozenset(
    (
        *("init", "init_max_missing", "init_keep_positions", "teacher", "teacher_pretrained", "targets"),
        *("text", "text_pooling", "text_projection", "precision", "image_size", "image_tokens"),
        *("image_tokens_weights", "image_patches", "image_patches_weights", "context_length"),
        *("patch_dropout", "image_mean", "image_std", "image_interpolation", "image_resize_mode"),
        *("lock_image", "lock_image_unlocked_groups", "lock_text", "lock_text_unlocked_layers"),
        *("unlock_after_step", "lora_rank", "lora_alpha", "lora_towers", "lora_targets", "sync_batch_norm"),
    )
)
"""Keys of [model] that count at their default, too: what is kept of models was written with all of these."""


def model_identity(job: Job) -> list[object]:
    """Returns what the features of a job's model depend on, and what no run may change while it trains it.

    A later key counts where it is not at its default, so that what was kept before it came stays valid.
    """
    free = {key.removeprefix("model.") for key in may_change_keys() if key.startswith("model.")}
    dumped, changed = (
        job.model.model_dump(mode="json", exclude={"name", "pretrained", *free}, exclude_defaults=defaults)
        for defaults in (False, True)
    )
    counted = _COUNTED_ALWAYS | changed.keys()
    settings = {key: value for key, value in dumped.items() if key in counted}
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
