"""Forms in which image towers take pictures: all of one size, or each in its own shape as patches.

A form makes a sample's picture a row of bytes of one shape for the loader, and of that what the tower takes.
`image_form` chooses it once for a model; nothing else asks which one it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import open_clip
import torch
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from trainer.config import Job, Model
from trainer.data.augment import augmentation
from trainer.data.loader import DrawsForBatches, Pixels
from trainer.data.patches import Budget, DrawnCrop, Fitted, PatchCrop, eval_patches, tower_input
from trainer.data.pictures import LONGER, Decoding, OfMiddle
from trainer.data.pixels import BYTES_OF_A_PIXEL, RandomCrop, normalised
from trainer.errors import InputError


@dataclass(frozen=True)
class ImageForm:
    """Functions that turn pictures into the input of an image tower."""

    size: tuple[int, ...]
    """Height and width of a picture in pixels; most patches of one, and a patch's height and width."""
    input_shape: tuple[int, ...]
    """Shape of one picture as the model takes it."""
    sample_bytes: int
    """Bytes of one picture as the loader gives it, of several sizes those of the largest."""
    crop: Pixels | DrawsForBatches
    """Function from a sample and a seed to bytes, for training, or what draws one for each global batch."""
    normalised: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Function from a batch of bytes, and mean and standard deviation [3], to what the model takes."""
    eval_transform: Callable[[Any], Tensor]
    """Function from a PIL image to what the model takes, float32, normalised."""
    of_open_clip: Callable[[Tensor], Any]
    """Function from what the model takes to what open_clip's own model takes."""
    one_size: bool
    """True if all pictures have the same size."""


def image_form(job: Job, model: Any, tokens: int | None) -> ImageForm:
    """Returns the form of a model's image tower, which `tokens` patches of a picture fit; None: one size.

    The tower takes it from now on. Raises InputError for a tower that takes no patches.
    """
    preprocess = open_clip.transform.PreprocessCfg(**model.visual.preprocess_cfg)
    augment: dict[str, Any] = {
        "scale": job.data.crop_scale,
        "ratio": job.data.augment.crop_ratio,
        "decoding": Decoding.by(job.data),
        "change": augmentation(job.data.augment),
    }
    shared = {"mean": preprocess.mean, "std": preprocess.std, "interpolation": preprocess.interpolation}
    if tokens is None:
        return _of_one_size(preprocess, augment, shared)
    embeds = _embeds(job, model.visual)
    model.visual.register_forward_pre_hook(_to_patches)
    height, width = embeds.patch_size
    budget = Budget(tokens, (int(height), int(width)))
    fitted = Fitted(budget.patch, embeds.pos_embed_interp_mode)
    crops = _drawn_crops(job.model, budget, augment)
    return _of_patches(budget, crops, fitted, shared)


def _drawn_crops(model: Model, budget: Budget, augment: Mapping[str, Any]) -> DrawnCrop:
    """Returns the crops of all pairs of a budget of patches and a size of them, with their weights."""
    budgets = model.token_budgets or (budget.tokens,)
    patches = [(edge, edge) for edge in model.image_patches or ()] or [budget.patch]
    often = [
        one * other
        for one, other in product(
            model.image_tokens_weights or (1.0,) * len(budgets),
            model.image_patches_weights or (1.0,) * len(patches),
        )
    ]
    crops = (PatchCrop(Budget(*pair), **augment) for pair in product(budgets, patches))
    return DrawnCrop(tuple(crops), tuple(often))


def _of_one_size(
    preprocess: open_clip.transform.PreprocessCfg, augment: Mapping[str, Any], shared: Mapping[str, Any]
) -> ImageForm:
    size = preprocess.size
    height, width = (size, size) if isinstance(size, int) else tuple(size[-2:])
    transform: Callable[[Any], Tensor] = open_clip.image_transform(
        size, is_train=False, resize_mode=preprocess.resize_mode, **shared
    )
    if preprocess.resize_mode == "shortest":
        transform = OfMiddle(transform, LONGER * max(height, width) / min(height, width))
    return ImageForm(
        size=(height, width),
        input_shape=(3, height, width),
        sample_bytes=BYTES_OF_A_PIXEL * height * width,
        crop=RandomCrop((height, width), **augment),
        normalised=normalised,
        eval_transform=transform,
        of_open_clip=lambda images: images,
        one_size=True,
    )


def _of_patches(budget: Budget, drawn: DrawnCrop, fitted: Fitted, shared: Mapping[str, Any]) -> ImageForm:
    return ImageForm(
        size=(budget.tokens, *budget.patch),
        input_shape=budget.shape,
        sample_bytes=drawn.most_bytes,
        crop=drawn if len(drawn.crops) > 1 else drawn.crops[0],
        normalised=fitted,
        eval_transform=OfMiddle(eval_patches(budget, **shared), max(LONGER, budget.tokens)),
        of_open_clip=tower_input,
        one_size=False,
    )


def _embeds(job: Job, visual: Any) -> Any:
    """Returns the embedding of a tower that takes patches, which it prepares.

    Raises InputError for others.
    """
    trunk: Any = getattr(visual, "trunk", None)
    embeds = trunk.embeds if isinstance(trunk, NaFlexVit) else None
    if embeds is None or not embeds.is_linear or not getattr(embeds, "channels_last", True):
        raise InputError(
            f"model.image_tokens: the image tower of {job.model.name} takes no patches whose colours are "
            "together, as the loader makes them: choose another model, or remove the key"
        )
    if job.model.image_patches and embeds.norm_input is not None:
        raise InputError(
            f"model.image_patches: the image tower of {job.model.name} normalises each patch before it is "
            "embedded, which is not the same for patches of another size: remove the key"
        )
    # A mask of keys has the same features in a T-th of the memory of timm's mask of pairs, and no row that is
    # masked whole.
    trunk.use_key_only_attn_mask = True
    return embeds


def _to_patches(_tower: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    rows = inputs[0]
    return (tower_input(rows), *inputs[1:]) if isinstance(rows, torch.Tensor) and rows.dim() == 3 else None
