"""Number of parameters of a model, from its config alone: for `clipship check`, which imports no torch."""

import json
from collections.abc import Mapping
from typing import Any

from trainer.model.catalog import config_file

_CHANNELS = 3
_STATE_BYTES = 12
"""Bytes of a parameter in float32 with AdamW's two moments."""


def parameters(name: str) -> int | None:
    """Returns the number of parameters of open_clip's own transformers; None for models that others define.

    It leaves out a few scalars and rare parts, such as pooling by attention. Pictures from timm and texts
    from Hugging Face have no size in their config.
    """
    try:
        config = json.loads(config_file(name).read_text(encoding="utf-8"))
        config = config.get("model_cfg", config)
        vision, text = config["vision_cfg"], config["text_cfg"]
        if "timm_model_name" in vision or "hf_model_name" in text or not isinstance(vision["layers"], int):
            return None
        return _vision(vision, config["embed_dim"]) + _text(text, config["embed_dim"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def state_bytes(name: str) -> int | None:
    """Returns the bytes of weights and optimizer state of a model that is trained as a whole, or None."""
    count = parameters(name)
    return None if count is None else _STATE_BYTES * count


def _vision(config: Mapping[str, Any], embed_dim: int) -> int:
    width, patch = config["width"], config["patch_size"]
    tokens = (config["image_size"] // patch) ** 2 + 1
    ends = _CHANNELS * width * patch**2 + width * (tokens + 1) + 4 * width + width * embed_dim
    return int(ends + config["layers"] * _block(width, config.get("mlp_ratio", 4.0)))


def _text(config: Mapping[str, Any], embed_dim: int) -> int:
    width = config["width"]
    ends = width * (config.get("vocab_size", 49408) + config.get("context_length", 77) + 2 + embed_dim)
    return int(ends + config["layers"] * _block(width, config.get("mlp_ratio", 4.0)))


def _block(width: int, mlp_ratio: float) -> int:
    """Returns the parameters of one block: attention, MLP and two layer norms."""
    hidden = int(width * mlp_ratio)
    return 4 * width * (width + 1) + 2 * width * hidden + hidden + width + 4 * width
