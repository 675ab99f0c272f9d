"""Reads in a model's config what its image tower takes and ignores. No torch.

That is the budget of patches of a tower that takes pictures of any shape (NaFlex), the pixels that patches
leave out, and whether `model.grad_checkpointing` does anything there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config import Model
from trainer.errors import raise_problems
from trainer.model.catalog import part_of, read_config
from trainer.text.wording import many

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
    tokens: int | None = part_of(config or read_config(model.name), "vision_cfg").get("image_seq_len")
    return tokens


def takes_any_shape(config: Mapping[str, Any]) -> bool:
    """Returns whether the image tower of a config is one of timm's for pictures of any shape."""
    return str(part_of(config, "vision_cfg").get("timm_model_name")).startswith(_TOWER)


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
    if part_of(config, "vision_cfg") and not takes_any_shape(config):
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


def lost_pixels(model: Model) -> Iterator[str]:
    """Yields a sentence if the model's patches leave out pixels at the right and at the bottom of an image.

    Models whose config does not say their patches are left out.
    """
    vision = read_config(model.name).get("vision_cfg")
    if not isinstance(vision, dict) or isinstance(vision.get("layers"), list) or "timm_model_name" in vision:
        return
    vision = {**vision, **model.tower_changes["vision_cfg"]}
    patch, size = vision.get("patch_size", 16), vision.get("image_size", 224)
    edges = [size] if isinstance(size, int) else list(size)
    if type(patch) is not int or not any(edge % patch for edge in edges):
        return
    lost = " and ".join(many(edge % patch, "pixel") for edge in edges if edge % patch)
    near = " or ".join(" x ".join(str(edge - edge % patch + more) for edge in edges) for more in (0, patch))
    given = " x ".join(map(str, edges))
    yield (
        f"images of {given} (model.image_size) are no multiple of the patches of {patch} pixels, which leave "
        f"{lost} of an edge unseen; {near} loses none"
    )


def not_recomputed(model: Model) -> Iterator[str]:
    """Yields a sentence if the job asks for checkpointed activations and the image tower is CLIP's ResNet.

    open_clip's ModifiedResNet accepts the setting and does nothing. timm's towers warn by themselves.
    """
    vision = part_of(read_config(model.name), "vision_cfg")
    ours = isinstance(vision.get("layers"), list) and "timm_model_name" not in vision
    if model.grad_checkpointing and ours:
        yield (
            f"model.grad_checkpointing does nothing in the image tower of {model.name}, a ResNet of "
            "open_clip's: it saves memory in the text tower alone"
        )
