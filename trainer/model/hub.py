"""Folders with the files of a model on the Hugging Face hub: in the cache if they are there, else downloaded.

HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE apply as in all programs that use huggingface_hub. A download that was
cut off goes on where it stopped, and a file counts only if its checksum is that under which the hub keeps it.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

from trainer.config.training import HUB_TEXT
from trainer.errors import InputError, StorageError

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
_VOCABULARIES = set(TOKENIZER_FILES) - {
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
}
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights, the best first; an index names more."""
_BLOCK = 2**20


def model_folder(name: str, cache_dir: str | None, parts: Parts) -> Path:
    """Returns a folder that has the parts of a model.

    `name` is a folder, or a model on the hub with or without `hf:`. The hub is asked only for what the cache
    lacks. Raises InputError if the folder or the model lacks a part, and what huggingface_hub raises if the
    hub does not answer.
    """
    if _is_folder(name):
        return _checked(Path(name), parts)
    plain = name.removeprefix(HUB_TEXT)
    return _cached(plain, cache_dir, parts) or _downloaded(plain, cache_dir, parts)


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
    return not name.startswith(HUB_TEXT) and Path(name).is_absolute()


def _cached(name: str, cache_dir: str | None, parts: Parts) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, cache_dir=cache_dir, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return None if _lacking(folder, parts) else folder


def _downloaded(name: str, cache_dir: str | None, parts: Parts) -> Path:
    """Downloads the parts of a model, and checks every file."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        there = HfApi().list_repo_files(name)
    except RepositoryNotFoundError:
        raise InputError(
            f'model.text: the hub has no model "{name}", or shows it only to those who log in (HF_TOKEN): '
            "check the name, which has the form OWNER/NAME"
        ) from None
    wanted = [CONFIG] if "config" in parts else []
    wanted += [file for file in TOKENIZER_FILES if "tokenizer" in parts and file in there]
    wanted += _weight_files(there) if "weights" in parts else []
    folder = Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=wanted))
    for file in wanted:
        if (folder / file).exists():
            check_blob(folder / file)
    return _checked(folder, parts, of=name)


def _weight_files(there: Iterable[str]) -> list[str]:
    """Returns the weights among a model's files in the best format that it has."""
    names = set(there)
    best = next((name for name in _WEIGHTS if name in names), None)
    if best is None or not best.endswith(".index.json"):
        return [best] if best else []
    stem, ending = best.removesuffix(".index.json").rsplit(".", 1)
    return [best, *sorted(name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+\.{ending}", name))]


def _checked(folder: Path, parts: Parts, of: str = "") -> Path:
    if lacking := _lacking(folder, parts):
        what = f"the model {of} on the hub" if of else f"the folder {folder}"
        raise InputError(f"model.text: {what} has no {' and no '.join(lacking)}: give another text tower")
    return folder


def _lacking(folder: Path, parts: Parts) -> list[str]:
    """Returns words for the parts that are not in the folder."""
    lacking = [] if "config" not in parts or (folder / CONFIG).is_file() else [CONFIG]
    if "tokenizer" in parts and not any((folder / name).is_file() for name in _VOCABULARIES):
        lacking.append(f"vocabulary ({', '.join(sorted(_VOCABULARIES))})")
    if "weights" in parts and not has_weights(folder):
        lacking.append("weights (model.safetensors or pytorch_model.bin)")
    return lacking


def has_weights(folder: Path) -> bool:
    """Returns whether a folder has a whole set of weights."""
    best = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if best is None or best.suffix != ".json":
        return best is not None
    parts = json.loads(best.read_text(encoding="utf-8"))["weight_map"].values()
    return all((folder / part).is_file() for part in parts)
