"""Finds the Python packages that a model of open_clip needs besides Clipship's own, from its config.

Imports no torch and no open_clip.
"""

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.errors import InputError
from trainer.model.catalog import config_file

_HUGGING_FACE = ("transformers",)
_SENTENCE_PIECE = ("transformers", "sentencepiece", "protobuf")
_IMPORTED_AS = {"protobuf": "google.protobuf"}


@dataclass(frozen=True)
class Need:
    """Packages, by their names for pip, and the reason for them, which becomes part of a sentence."""

    packages: tuple[str, ...] = ()
    reason: str = ""


def needed(model: str) -> Need:
    """Returns the packages that the model's config asks for.

    There are none for the hub's models and for configs that cannot be read, which the ranks check. The rules
    are those of open_clip's factory.py: text towers and tokenizers of Hugging Face's, and a vocabulary for
    names with siglip.
    """
    text = _text_config(model)
    if text is None:
        return Need()
    if tower := text.get("hf_model_name"):
        return Need(_HUGGING_FACE, f"its text tower is {tower} from Hugging Face")
    if tokenizer := text.get("hf_tokenizer_name"):
        return Need(_HUGGING_FACE, f"its tokenizer is {tokenizer} from Hugging Face")
    if ":" not in model and "siglip" in Path(model).name.lower():
        return Need(
            _SENTENCE_PIECE,
            "open_clip fetches SigLIP's vocabulary for every model with siglip in its name, "
            "unless text_cfg names a hf_tokenizer_name",
        )
    return Need()


def check_packages(job: Job) -> None:
    """Raises InputError if this machine's ranks lack a package that the model needs."""
    need = needed(job.model.name)
    lacking = [name for name in need.packages if not _is_here(name)]
    if lacking:
        raise InputError(
            f"model.name: {job.model.name} needs {_listed(lacking)} ({need.reason}): "
            f"`pip install {' '.join(lacking)}`"
        )


def image_packages(job: Job) -> tuple[str, ...]:
    """Returns the packages that pip adds to the image.

    Those that the job names come first, then those that its model needs.
    """
    return (*job.image.pip_packages, *not_named(job))


def not_named(job: Job) -> tuple[str, ...]:
    """Returns the packages that the model needs and image.pip_packages does not name."""
    named = {re.split(r"[^\w.-]", text, maxsplit=1)[0].lower() for text in job.image.pip_packages}
    return tuple(name for name in needed(job.model.name).packages if name not in named)


def _text_config(model: str) -> Mapping[str, Any] | None:
    try:
        config = json.loads(config_file(model).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    parts = config.get("model_cfg", config) if isinstance(config, dict) else None
    text = parts.get("text_cfg") if isinstance(parts, dict) else None
    return text if isinstance(text, dict) else None


def _is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(_IMPORTED_AS.get(package, package)) is not None
    except ModuleNotFoundError:  # the package's parent package is missing
        return False


def _listed(names: list[str]) -> str:
    return f"the package {names[0]}" if len(names) == 1 else f"the packages {', '.join(names)}"
