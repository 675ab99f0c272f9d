"""Budget of patches of a model whose image tower takes pictures of any shape (NaFlex). No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config import Model
from trainer.errors import raise_problems
from trainer.model.catalog import read_config

_TOWER = "naflexvit_"
"""Beginning of timm's names of such towers."""
_UNUSED = ("image_size", "image_resize_mode", "patch_dropout", "cuda_graphs")
"""Keys that such a model cannot have: pictures keep their shape, and each step has other shapes."""


def image_tokens(model: Model, config: Mapping[str, Any] | None = None) -> int | None:
    """Returns most patches of a picture, of several the largest; None for a model with pictures of one size.

    `config` is the model's; None reads it.
    """
    if model.token_budgets:
        return max(model.token_budgets)
    tokens: int | None = _vision(config or read_config(model.name)).get("image_seq_len")
    return tokens


def takes_any_shape(config: Mapping[str, Any]) -> bool:
    """Returns whether the image tower of a config is one of timm's for pictures of any shape."""
    return str(_vision(config).get("timm_model_name")).startswith(_TOWER)


def check_image_tokens(model: Model, config: Mapping[str, Any] | None = None) -> None:
    """Raises InputError for a budget of a tower that takes none, and for keys that it excludes."""
    raise_problems(_problems(model, config))


def _problems(model: Model, config: Mapping[str, Any] | None) -> Iterator[str]:
    config = config or read_config(model.name)
    tokens = image_tokens(model, config)
    if tokens is None:
        if model.image_patches:
            yield f"model.image_patches: {model.name} takes images of one size: give model.image_tokens, too"
        return
    if _vision(config) and not takes_any_shape(config):
        yield (
            f"model.image_tokens = {tokens}: the image tower of {model.name} takes images of one size; those "
            f"that take any shape are timm's {_TOWER}...: remove the key, or choose another model"
        )
        return
    given = [name for name in _UNUSED if getattr(model, name) not in (None, False)]
    for name in given:
        yield (
            f"model.{name}: {model.name} takes images of any shape, in up to {tokens} patches "
            "(model.image_tokens), which excludes this key: remove it"
        )


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config.get("vision_cfg")
    return vision if isinstance(vision, dict) else {}
