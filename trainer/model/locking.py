"""Freezes towers, whole or but for the layers at their end (LiT, arXiv 2111.07991)."""

import warnings

from torch import nn

from trainer.config import Model
from trainer.errors import InputError
from trainer.model.layer_numbers import TOWERS, layers_of
from trainer.model.sync_batch_norm import has_batch_norm, lock_batch_norm

_NO_GROUPS = (AssertionError, AttributeError, NotImplementedError, RuntimeError)
"""Exceptions by which open_clip and timm say that they know no groups in a tower."""


def lock_towers(model: nn.Module, settings: Model) -> None:
    """Freezes what the settings lock for the whole run, and all of a tower that LoRA adapts.

    Statistics of batch norm are frozen with the image tower's layers. Groups of layers are those of
    open_clip. Raises InputError if a tower has no groups, or no more than are to stay unlocked.
    """
    if settings.lora_rank:
        _freeze_adapted(model, settings)
    if settings.unlock_after_step is None:
        _freeze(model, settings)


def locked_first(model: nn.Module, settings: Model) -> frozenset[str]:
    """Returns the names of the parameters that are locked until `model.unlock_after_step`; none without it.

    They have gradients all along, which the step drops: no layer is built anew in the middle of a run.
    Raises InputError as `lock_towers` does, and for a tower whose batch norm would have to be unlocked.
    """
    if settings.unlock_after_step is None:
        return frozenset()
    if settings.lock_image and has_batch_norm(model.get_submodule("visual")):
        raise InputError(
            "model.unlock_after_step: this model's image tower has batch norm, whose statistics stay as they "
            "are while it is locked: leave the key out, or choose a model without batch norm"
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    _freeze(model, settings)
    locked = {name for name in trained if not model.get_parameter(name).requires_grad}
    for name in locked:
        model.get_parameter(name).requires_grad_()
    return frozenset(locked)


def _freeze_adapted(model: nn.Module, settings: Model) -> None:
    for name, layer in layers_of(model).items():
        if settings.lora[TOWERS.index(layer.tower)]:
            model.get_parameter(name).requires_grad_(False)
    if settings.lora[0]:
        lock_batch_norm(model.visual)  # type: ignore[arg-type]


def _freeze(model: nn.Module, settings: Model) -> None:
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
