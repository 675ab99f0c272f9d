"""Number of parameters of a text tower of Hugging Face, from its config.json alone. Imports no torch.

The file is that of the folder, of the hub's cache, or a row of `HUB_TOWERS`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import Model
from trainer.config.training import HUB_TEXT
from trainer.model.catalog import part_of, read_config
from trainer.model.hub_towers import HUB_TOWERS
from trainer.model.text_config import text_config
from trainer.safe_io.plain import read_json

_BERTS = ("bert", "roberta", "xlm-roberta")
"""Kinds of towers of which the arithmetic here is that of transformers."""
_HUB_CACHE = "~/.cache/huggingface"


def text_tower(model: Model) -> str:
    """Returns the name or folder of a model's text tower of Hugging Face; "" if it has none."""
    if model.text is not None:
        return model.text.removeprefix(HUB_TEXT)
    return str(part_of(read_config(model.name), "text_cfg").get("hf_model_name") or "")


def text_parameters(model: Model) -> int | None:
    """Returns the parameters of a text tower of Hugging Face with its projection; None if not known."""
    about, config = _config(text_tower(model), model.cache_dir), read_config(model.name)
    if about.get("model_type") not in _BERTS or not {"embed_dim", "text_cfg"} <= config.keys():
        return None
    try:
        text = text_config(model, config)
        return _of_bert(about, text) + _projection(about["hidden_size"], config["embed_dim"], text)
    except (KeyError, TypeError, ValueError):
        return None


def _of_bert(about: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    width, hidden = about["hidden_size"], about["intermediate_size"]
    rows = about["vocab_size"] + about["max_position_embeddings"] + about.get("type_vocab_size", 2)
    block = 4 * width * (width + 1) + 2 * width * hidden + hidden + width + 4 * width
    pooler = width * (width + 1) if text.get("hf_pooler_type") == "cls_pooler" else 0
    return int(rows * width + 2 * width + about["num_hidden_layers"] * block + pooler)


def _projection(width: int, embed_dim: int, text: Mapping[str, Any]) -> int:
    kind = text.get("hf_proj_type", "mlp")
    middle = (width + embed_dim) // 2
    return {"linear": width * embed_dim, "mlp": middle * (width + embed_dim)}.get(kind, 0)


def _config(name: str, cache_dir: str | None) -> Mapping[str, Any]:
    """Returns the content of a tower's config.json; empty if none is at hand."""
    if name in HUB_TOWERS:
        return HUB_TOWERS[name]
    for folder in [Path(name)] if name.startswith("/") else _snapshots(name, cache_dir):
        try:
            content = read_json(folder / "config.json", links=True)
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            return content
    return {}


def _snapshots(name: str, cache_dir: str | None) -> list[Path]:
    """Returns the folders of a model in the hub's cache."""
    home = Path(os.environ.get("HF_HOME") or _HUB_CACHE).expanduser()
    cache = Path(cache_dir) if cache_dir else Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return sorted((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
