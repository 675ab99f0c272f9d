"""Warns of what a job takes from a hub that its ranks may not ask, and that they would not find in a cache.

Asks no hub, and imports no torch and no open_clip.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from trainer.config import Job, Model
from trainer.config.hubs import hub_of
from trainer.config.training import HUB_TEXT
from trainer.model.catalog import HUB, read_config, teacher_of
from trainer.model.hub_clients import client_of
from trainer.model.tags import tag_repository
from trainer.model.text_config import text_config


def not_fetched(job: Job) -> Iterator[str]:
    """Yields a sentence if no cache that this machine sees has all that the job takes from hubs.

    Nothing for ranks that may ask a hub themselves, nor for a cache in a folder that this machine lacks.
    """
    parts = hub_parts(job.model) if job.offline else {}
    cache = job.model.cache_dir
    if parts and cache is None and job.in_image:
        yield (
            f"{_listed(parts)}: the image has none of it, and ranks may not ask the hub (model.offline): set "
            "model.cache_dir to a folder that all nodes see, then `clipship fetch JOB`"
        )
    elif find_spec("huggingface_hub") and (cache is None or os.path.isdir(os.path.dirname(cache))):
        missing = {part: name for part, name in parts.items() if client_of(name)[1].cached(cache, ()) is None}
        if missing:
            yield (
                f"{_listed(missing)}: not in the cache ({cache or 'model.cache_dir is not set'}), and ranks "
                "may not ask the hub (model.offline): `clipship fetch JOB` downloads it beforehand"
            )


def hub_parts(model: Model) -> dict[str, str]:
    """Returns what a model takes from hubs, in words, each with the name that its hub knows."""
    parts = {}
    if model.name.startswith(HUB):
        parts[f"model.name = {model.name}"] = model.name.removeprefix(HUB)
    given = model.pretrained or ""
    if from_hub := given if hub_of(given) else tag_repository(model.name, given):
        parts[f"model.pretrained = {given}"] = from_hub
    config = read_config(model.name)
    text = text_config(model, config) if "text_cfg" in config else {}
    for key, what in {"hf_model_name": "text tower", "hf_tokenizer_name": "tokenizer"}.items():
        if (name := text.get(key)) and not name.startswith("/"):
            parts[f"the {what} {name.removeprefix(HUB_TEXT)}"] = name
    if model.teacher is not None:
        parts |= {f"of the teacher {part}": name for part, name in hub_parts(teacher_of(model)).items()}
    return parts


def _listed(parts: dict[str, str]) -> str:
    return ", ".join(part if part.endswith(name) else f"{part} ({name})" for part, name in parts.items())
