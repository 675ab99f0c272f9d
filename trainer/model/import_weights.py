"""Converts released weights of other formats to a file that `model.pretrained` takes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from trainer.checkpoint.weights import cause
from trainer.checkpoint.weights_kind import check_kind
from trainer.errors import InputError
from trainer.model.key_names import FORMATS, Format, Weights, format_of, to_open_clip
from trainer.model.released import CONFIG, UNKNOWN, Released, names_of, released
from trainer.safe_io.atomic import replacing, write_json

_CHINESE_TEXT = {
    (768, 12): "hf:hfl/chinese-roberta-wwm-ext",
    (1024, 24): "hf:hfl/chinese-roberta-wwm-ext-large",
    (768, 3): "hf:hfl/rbt3",
}
"""Text tower of Chinese-CLIP by its width and the number of its blocks."""


@dataclass(frozen=True)
class Imported:
    """Weights that were converted."""

    kind: Format
    keys: Mapping[str, Any]
    """Keys of [model] that fit them; a question mark stands for what is not known."""
    notes: tuple[str, ...]
    """Sentences about what cannot be known."""


def import_weights(source: Path, target: Path) -> Imported:
    """Writes the weights in `source` to `target` (.safetensors) under open_clip's names.

    A model that open_clip has under no name gets a config file beside `target`. Raises InputError for a file
    that holds no weights of a known format.
    """
    weights = _read(source)
    kind = format_of(weights)
    if kind is None:
        raise InputError(
            f"{source}: its parameters have names of none of these formats: {', '.join(FORMATS)}. Weights of "
            "open_clip need no import: model.pretrained takes them as they are."
        )
    try:
        converted = to_open_clip(weights, kind)
        _check_towers(converted)
    except (InputError, KeyError) as problem:
        raise InputError(f"{source} looks like {kind}, but cannot be converted: {problem}") from None
    try:
        keys, notes = _keys(converted, kind, source.parent, target)
        with replacing(target) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in converted.items()}))
    except OSError as problem:
        raise InputError(f"{target} cannot be written: {problem.strerror}") from None
    return Imported(kind, {**keys, "pretrained": str(target)}, tuple(notes))


def _read(path: Path) -> Mapping[str, Tensor]:
    """Returns the tensors by name; runs no code from the file."""
    check_kind(path)
    try:
        content: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:  # damaged bytes can make the readers raise anything
        raise InputError(f"{path} holds no weights that can be read safely ({cause(error)})") from None
    tensors = content.get("state_dict", content) if isinstance(content, dict) else {}
    return {str(name): value for name, value in tensors.items() if isinstance(value, Tensor)}


def _check_towers(weights: Weights) -> None:
    """Raises InputError for weights without an image tower, or without its way to the features."""
    if not any(name == "visual.proj" or name.startswith("visual.attnpool.") for name in weights):
        raise InputError(
            "it has no image tower, or one without a projection to the features. A text tower alone is one "
            "for model.text: give its folder there, with config.json and the tokenizer's files."
        )


def _keys(weights: Weights, kind: Format, folder: Path, target: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the keys of [model], and sentences about what cannot be known."""
    text = {} if kind == "transformers CLIPModel" else _chinese_text(weights)
    if "visual.layer1.0.conv1.weight" in weights:  # Chinese-CLIP's, whose code has these values
        return {"name": "RN50-quickgelu", "image_resize_mode": "squash", **text}, []
    found = released(weights, kind, folder)
    if found.complete:
        return {"name": _name(found, target), **text, **found.keys}, found.notes
    either = [name for quick in (True, False) for name in names_of({**found.config, "quick_gelu": quick})[:1]]
    note = (
        f"whether the model computes GELU or QuickGELU stands in no weight, but in hidden_act of {CONFIG}, "
        "which does not lie beside them: put it there, or find it out and write the name"
    )
    found.notes.append(note + (f" ({' or '.join(either)})" if either else ""))
    return {"name": UNKNOWN, **text, **found.keys}, found.notes


def _name(found: Released, target: Path) -> str:
    """Returns open_clip's name of the model, or the path of a config that is written beside the weights."""
    if names := names_of(found.config):
        return names[0]
    if "text_cfg" not in found.config:
        found.notes.append(f"open_clip has no image tower of these sizes: {json.dumps(found.config)}")
        return UNKNOWN
    path = target.with_suffix(".json")
    write_json(path, found.config)
    return str(path)


def _chinese_text(weights: Weights) -> dict[str, Any]:
    width = weights["text.transformer.embeddings.word_embeddings.weight"].shape[1]
    blocks = {name.split(".")[4] for name in weights if name.startswith("text.transformer.encoder.layer.")}
    text = _CHINESE_TEXT.get((width, len(blocks)), UNKNOWN)
    return {"text": text, "text_pooling": "cls", "context_length": 52}
