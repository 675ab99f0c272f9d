"""Converts released weights of other formats to a file that `model.pretrained` takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from trainer.checkpoint.weights import cause
from trainer.errors import InputError
from trainer.model.key_names import FORMATS, Format, Weights, format_of, to_open_clip
from trainer.safe_io.atomic import replacing

_CHINESE_TEXT = {
    (768, 12): "hf:hfl/chinese-roberta-wwm-ext",
    (1024, 24): "hf:hfl/chinese-roberta-wwm-ext-large",
    (768, 3): "hf:hfl/rbt3",
}
"""Text tower of Chinese-CLIP by its width and the number of its blocks."""
_VISION = {(768, 16): "ViT-B-16", (768, 32): "ViT-B-32", (1024, 14): "ViT-L-14", (1280, 14): "ViT-H-14"}
"""Image tower by its width and the edge of its patches."""
_POSITIONS_336 = 577


def import_weights(source: Path, target: Path) -> tuple[Format, dict[str, Any]]:
    """Writes the weights in `source` to `target` (.safetensors) under open_clip's names.

    Returns their format and the keys of [model] that fit them. Raises InputError for a file that holds no
    weights of a known format.
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
    except (InputError, KeyError) as problem:
        raise InputError(f"{source} looks like {kind}, but cannot be converted: {problem}") from None
    try:
        with replacing(target) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in converted.items()}))
    except OSError as problem:
        raise InputError(f"{target} cannot be written: {problem.strerror}") from None
    return kind, {**_keys(converted, kind), "pretrained": str(target)}


def _read(path: Path) -> Mapping[str, Tensor]:
    """Returns the tensors by name; runs no code from the file."""
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


def _keys(weights: Weights, kind: Format) -> dict[str, Any]:
    """Returns the keys of [model] of which the shapes tell."""
    name = _image_name(weights)
    keys: dict[str, Any] = {"name": f"{name}-quickgelu" if name else "?"}
    if kind == "transformers CLIPModel":
        return keys
    width = weights["text.transformer.embeddings.word_embeddings.weight"].shape[1]
    blocks = {name.split(".")[4] for name in weights if name.startswith("text.transformer.encoder.layer.")}
    text = _CHINESE_TEXT.get((width, len(blocks)), "?")
    return {
        **keys,
        "text": text,
        "text_pooling": "cls",
        "context_length": 52,
        "image_resize_mode": "squash",
    }


def _image_name(weights: Weights) -> str:
    if "visual.layer1.0.conv1.weight" in weights:
        return "RN50"
    stem, places = weights.get("visual.conv1.weight"), weights.get("visual.positional_embedding")
    if stem is None or places is None:
        return ""
    name = _VISION.get((stem.shape[0], stem.shape[2]), "")
    return f"{name}-336" if name == "ViT-L-14" and len(places) == _POSITIONS_336 else name
