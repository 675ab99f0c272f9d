"""Folders with the files of a model on a hub: in the cache if they are there, else downloaded."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from trainer.config.hubs import hub_of
from trainer.errors import InputError, StorageError
from trainer.model.hub_clients import client_of
from trainer.safe_io.plain import read_json

Parts = Collection[Literal["config", "tokenizer", "weights"]]
"""Parts of a model that are wanted."""
CONFIG = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
)
"""Files of a tokenizer, of which each model has some."""
VOCABULARIES = set(TOKENIZER_FILES) - {
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
}
"""Those of them that hold words."""
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights, the best first; an index names more."""
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""Files of weights that open_clip uploads, the best first."""
OPEN_CLIP_CONFIG = "open_clip_config.json"
"""Name of the file beside them that has the model's config and its preprocessing."""
_BLOCK = 2**20


def model_folder(name: str, cache_dir: str | None, parts: Parts) -> Path:
    """Returns a folder that has the parts of a model.

    `name` is a folder, or a model on a hub, on Hugging Face's with or without `hf:`. The hub is asked only
    for what the cache lacks. Raises InputError if the folder or the model lacks a part, and what the hub's
    client raises if the hub does not answer.
    """
    if _is_folder(name):
        return _checked(Path(name), parts)
    folder = client_of(name)[1].cached(cache_dir, _few(parts))
    if folder is not None and not _lacking(folder, parts):
        return folder
    return _checked(_downloaded("model.text", name, cache_dir, partial(_wanted, parts)), parts, of=name)


def hub_weights(key: str, name: str, cache_dir: str | None) -> Path:
    """Returns open_clip's weights of a model on a hub, which `key` of the job file names.

    Raises as `model_folder` does.
    """
    folder = client_of(name)[1].cached(cache_dir, [OPEN_CLIP_CONFIG])
    if folder is None or _open_clip_weights(folder) is None:
        folder = _downloaded(key, name, cache_dir, _best_of_open_clip)
    if folder is None or (file := _open_clip_weights(folder)) is None:
        raise InputError(
            f"{key}: {name} has no weights in open_clip's form ({', '.join(OPEN_CLIP_WEIGHTS)}): name "
            "another model, or convert downloaded weights of transformers or Chinese-CLIP with "
            "`clipship import`"
        )
    return file


def _best_of_open_clip(there: list[str]) -> list[str]:
    best = [name for name in OPEN_CLIP_WEIGHTS if name in there][:1]
    return [*best, OPEN_CLIP_CONFIG] if best and OPEN_CLIP_CONFIG in there else best


def _open_clip_weights(folder: Path) -> Path | None:
    return next((folder / name for name in OPEN_CLIP_WEIGHTS if (folder / name).is_file()), None)


def check_blob(path: Path) -> None:
    """Raises StorageError if a file in the cache differs from the checksum by which it is called there.

    The file is removed, so that it is downloaded again. A file without such a name is left alone.
    """
    blob = path.resolve()
    if _has_its_checksum(blob):
        return
    blob.unlink()
    path.unlink(missing_ok=True)
    raise StorageError(
        f"{path.name}: its checksum differs from the hub's, so the download is damaged; it is removed: start "
        "again to download it again"
    )


def _has_its_checksum(blob: Path) -> bool:
    if re.fullmatch("[0-9a-f]{64}", blob.name):
        with blob.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == blob.name
    if re.fullmatch("[0-9a-f]{40}", blob.name):  # git's name of a file
        digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
        with blob.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest() == blob.name
    return True


def _is_folder(name: str) -> bool:
    return hub_of(name) is None and Path(name).is_absolute()


def _downloaded(
    key: str, name: str, cache_dir: str | None, wanted: Callable[[list[str]], Sequence[str]]
) -> Path | None:
    """Downloads the files of a model that are wanted of those that it has, and checks each.

    Returns their folder; None if the model has none of them.
    """
    row, client = client_of(name)
    there = client.files()
    if there is None:
        raise InputError(
            f'{key}: {row.title} has no model "{client.repository}", or shows it only to those who log in: '
            "check the name, which has the form OWNER/NAME"
        )
    names = wanted(there)
    if not names:
        return None
    folder = client.download(cache_dir, names)
    for file in names:
        if (folder / file).exists():
            check_blob(folder / file)
    return folder


def _wanted(parts: Parts, there: list[str]) -> list[str]:
    """Returns the files of the parts among those of a model."""
    wanted = [file for file in _few(parts) if file in there]
    return wanted + (_weight_files(there) if "weights" in parts else [])


def _few(parts: Parts) -> list[str]:
    """Returns the files of the parts other than weights, of which the best format alone is wanted."""
    return [CONFIG] * ("config" in parts) + [*TOKENIZER_FILES] * ("tokenizer" in parts)


def _weight_files(there: Iterable[str]) -> list[str]:
    """Returns the weights among a model's files in the best format that it has."""
    names = set(there)
    best = next((name for name in _WEIGHTS if name in names), None)
    if best is None or not best.endswith(".index.json"):
        return [best] if best else []
    stem, ending = best.removesuffix(".index.json").rsplit(".", 1)
    return [best, *sorted(name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+\.{ending}", name))]


def _checked(folder: Path | None, parts: Parts, of: str = "") -> Path:
    lacking = _lacking(folder, parts)
    if folder is None or lacking:
        what = f"the model {of} on the hub" if of else f"the folder {folder}"
        raise InputError(f"model.text: {what} has no {' and no '.join(lacking)}: give another text tower")
    return folder


def _lacking(folder: Path | None, parts: Parts) -> list[str]:
    """Returns words for the parts that are not in the folder."""
    there = {file.name for file in folder.iterdir() if file.is_file()} if folder else set()
    lacking = [CONFIG] if "config" in parts and CONFIG not in there else []
    if "tokenizer" in parts and not there & VOCABULARIES:
        lacking.append(f"vocabulary ({', '.join(sorted(VOCABULARIES))})")
    if "weights" in parts and not (folder and has_weights(folder)):
        lacking.append("weights (model.safetensors or pytorch_model.bin)")
    return lacking


def has_weights(folder: Path) -> bool:
    """Returns whether a folder has a whole set of weights."""
    best = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if best is None or best.suffix != ".json":
        return best is not None
    parts = read_json(best, links=True)["weight_map"].values()
    return all((folder / part).is_file() for part in parts)
