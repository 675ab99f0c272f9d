"""Freezes towers, whole or but for the layers at their end (LiT, arXiv 2111.07991)."""

import warnings

from torch import nn

from trainer.config import Model
from trainer.errors import InputError
from trainer.model.sync_batch_norm import lock_batch_norm

_NO_GROUPS = (AssertionError, AttributeError, NotImplementedError, RuntimeError)
"""Exceptions by which open_clip and timm say that they know no groups in a tower."""


def lock_towers(model: nn.Module, settings: Model) -> None:
    """Freezes what the settings lock; statistics of batch norm are frozen with the image tower's layers.

    Groups of layers are those of open_clip. Raises InputError if a tower has no groups, or no more than are
    to stay unlocked.
    """
    if settings.lock_image:
        unlocked = settings.lock_image_unlocked_groups
        _lock(model, "image", "lock_image_unlocked_groups", unlocked)
        lock_batch_norm(model.visual)  # type: ignore[arg-type]
    if settings.lock_text:
        _lock(model, "text", "lock_text_unlocked_layers", settings.lock_text_unlocked_layers)


def _lock(model: nn.Module, tower: str, key: str, unlocked: int) -> None:
    before = _trained(model)
    try:
        # open_clip takes timm's groups from an old place.
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            getattr(model, f"lock_{tower}_tower")(unlocked)
    except _NO_GROUPS as error:
        if not unlocked:
            raise
        raise InputError(
            f"model.{key} = {unlocked}: this model's {tower} tower has no groups of layers that can be "
            f"unlocked ({error}): set it to 0, or choose another model"
        ) from None
    if _trained(model) == before:
        raise InputError(
            f"model.{key} = {unlocked} leaves the whole {tower} tower unlocked: "
            f"set a smaller number, or model.lock_{tower} = false"
        )


def _trained(model: nn.Module) -> int:
    return sum(parameter.requires_grad for parameter in model.parameters())
