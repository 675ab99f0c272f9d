"""Preprocessing of images and tokenizer that belong to weights: what is said of them beside these.

open_clip knows it for its own tags and for a hub's models. Of a file it knows nothing and takes OpenAI's, so
a checkpoint's manifest has it, and an export has open_clip's own config. What a job sets counts before.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from trainer.config.training import PREPROCESSING, Model
from trainer.errors import InputError
from trainer.model.hub import OPEN_CLIP_CONFIG
from trainer.run.checkpoints import MANIFEST, MODEL_CONFIG
from trainer.safe_io.plain import read_json

_PLACES = ((MANIFEST, "preprocessing"), (OPEN_CLIP_CONFIG, "preprocess_cfg"))
"""Files beside weights, and their keys that have it."""


def preprocessing_of(model: nn.Module) -> dict[str, Any]:
    """Returns the preprocessing of a model that open_clip has made, as files keep it."""
    known: Any = model.visual.preprocess_cfg  # type: ignore[union-attr]
    values = {key: _channels(known[key]) for key in PREPROCESSING if known.get(key) is not None}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def said_beside(weights: Path, settings: Model) -> dict[str, Any]:
    """Returns what a file beside the weights says, but for what the job sets; empty if none does.

    Raises InputError for what is no preprocessing.
    """
    found = _found(weights)
    asked = settings.preprocessing
    left = {
        key: _channels(found[key]) for key in PREPROCESSING if found.get(key) is not None and key not in asked
    }
    try:
        checked = Model.model_validate({PREPROCESSING[key]: value for key, value in left.items()})
    except ValidationError as problem:
        wrong = " and ".join(f"model.{error['loc'][0]}" for error in problem.errors())
        raise InputError(
            f"{weights}: the preprocessing that is said beside it cannot be used: set {wrong}"
        ) from None
    return dict(checked.preprocessing)


def tokenizer_beside(weights: Path) -> str | None:
    """Returns the tokenizer of Hugging Face's that a config beside the weights names; "" if it names none.

    None if no config lies there.
    """
    config = _table(weights, OPEN_CLIP_CONFIG).get("model_cfg") or _table(weights, MODEL_CONFIG)
    text = config.get("text_cfg") if isinstance(config, dict) else None
    if not isinstance(text, dict):
        return None
    return str(text.get("hf_tokenizer_name") or text.get("hf_model_name") or "")


def _found(weights: Path) -> Mapping[str, Any]:
    for name, key in _PLACES:
        if isinstance(found := _table(weights, name).get(key), dict):
            return found
    return {}


def _table(weights: Path, name: str) -> Mapping[str, Any]:
    """Returns the table in a file beside the weights; empty if there is none."""
    try:
        said = read_json(weights.with_name(name), links=True)
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _channels(value: Any) -> Any:
    """Returns the values of red, green and blue, for which open_clip's files may have one; or a text."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) * 3 if isinstance(value, float | int) else value
