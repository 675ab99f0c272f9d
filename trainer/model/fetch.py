"""Downloads what a job names on a hub beforehand: weights, tokenizer, text tower.

Ranks of a cluster then find all of it in the cache and ask no hub. A download that was cut off goes on, and
files that are there already are checked and kept.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import timm
from huggingface_hub import try_to_load_from_cache
from open_clip.pretrained import download_pretrained, download_pretrained_from_hf, get_pretrained_cfg

from trainer.config import Job
from trainer.config.hubs import hub_of
from trainer.config.training import HUB_TEXT
from trainer.model.build import model_config, registered
from trainer.model.catalog import HUB, teacher_of
from trainer.model.hub import check_blob
from trainer.model.init import TIMM
from trainer.model.loading import loading, pretrained_file
from trainer.model.text_source import TextSource, text_source


@dataclass(frozen=True)
class Fetched:
    """A part of the job that lies on this machine now."""

    what: str
    path: Path

    @property
    def size(self) -> int:
        """Bytes of the file, or of all files of the folder."""
        paths = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(path.stat().st_size for path in paths if path.is_file())


def fetch(job: Job) -> Iterator[Fetched]:
    """Yields each part of the job that a hub has, as soon as it is on this machine and its checksum is right.

    Raises InputError for names that the hub does not have, StorageError if it does not answer or if a file is
    damaged.
    """
    if job.model.teacher is not None:
        yield from fetch(job.model_copy(update={"model": teacher_of(job.model)}))
    pretrained = pretrained_file(job)
    if pretrained and hub_of(str(job.model.pretrained)):
        yield _checked(f"weights {job.model.pretrained}", pretrained)
    with loading(job, pretrained):
        name = registered(job.model.name)
        yield from _weights(job, name, pretrained)
        config = model_config(name, job.model.cache_dir)
        if job.model.init == TIMM and config is not None:
            yield from _timm_tower(config["vision_cfg"]["timm_model_name"])
        begins = pretrained is None and ":" not in name
        text = text_source(job.model, config, weights=begins) if config else None
        if text is not None:
            yield from _text(text)
        elif config is not None and ":" not in name and _is_fetched(name, config["text_cfg"]):
            open_clip.get_tokenizer(name, cache_dir=job.model.cache_dir)


def _is_fetched(name: str, text: Mapping[str, Any]) -> bool:
    """Returns whether open_clip fetches the vocabulary: SigLIP's, or tiktoken's into TIKTOKEN_CACHE_DIR."""
    return "siglip" in name.lower() or "tokenizer_type" in text


def _weights(job: Job, name: str, pretrained: str | None) -> Iterator[Fetched]:
    """Yields the weights of a tag, or those of a model on a hub."""
    cache = job.model.cache_dir
    if name.startswith(HUB):
        yield _checked(
            f"weights {name}", download_pretrained_from_hf(name.removeprefix(HUB), cache_dir=cache)
        )
        return
    about = get_pretrained_cfg(name, pretrained) if pretrained and not os.path.isfile(pretrained) else None
    if about:
        yield _checked(f"weights {name}:{pretrained}", download_pretrained(about, cache_dir=cache))


def _timm_tower(name: str) -> Iterator[Fetched]:
    """Yields the weights of timm's image tower, which timm keeps in HF_HOME and open_clip finds there."""
    timm.create_model(name, pretrained=True)
    source = timm.models.get_pretrained_cfg(name)
    at_hub = source and source.hf_hub_id
    for file in ("model.safetensors", "pytorch_model.bin"):
        path = try_to_load_from_cache(at_hub, file) if at_hub else None
        if isinstance(path, str):
            yield _checked(f"image tower {at_hub}", path)
            return


def _text(text: TextSource) -> Iterator[Fetched]:
    places = {"text tower": "hf_model_name", "tokenizer": "hf_tokenizer_name"}
    for what, key in places.items():
        named = text.names.get(key)
        if named and not str(named).startswith("/"):
            folder = Path(text.config[key])
            for file in folder.iterdir():
                check_blob(file)
            yield Fetched(f"{what} {str(named).removeprefix(HUB_TEXT)}", folder)


def _checked(what: str, path: str) -> Fetched:
    check_blob(Path(path))
    return Fetched(what, Path(path))
