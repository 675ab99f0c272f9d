"""A tiny model whose image tower takes pictures of any shape. Importing this makes timm know its tower.

The towers that timm defines are large, and open_clip takes no other sizes of them before release 4.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import register_model
from torch import Tensor, nn

from tests.support.jobs import MODELS

NAFLEX = str(MODELS / "tiny-naflex.json")
PATCH, TOKENS = 8, 16
SHAPES = ((32, 32), (90, 50), (20, 61), (8, 64), (200, 31), (5, 5), (64, 16), (33, 47))
"""Widths and heights of pictures, of which some fill the budget and some do not."""


@register_model
def naflexvit_tiny_patch8(pretrained: bool = False, **keys: Any) -> nn.Module:
    """Image tower of SigLIP 2 for any shape, with two narrow blocks."""
    small = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": PATCH, "pos_embed_grid_size": (4, 4)}
    tower: nn.Module = timm.models.naflexvit.naflexvit_base_patch16_siglip(pretrained, **small, **keys)
    return tower


@contextmanager
def whole_precision() -> Iterator[None]:
    """Keeps timm from interpolating positions in float32, which rounds the share of each rank anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda tensor: tensor)
        yield


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Returns a picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def rows_of_patches(batch: Mapping[str, Tensor]) -> Tensor:
    """Returns what our model takes for a batch of timm's collator."""
    count, tokens, width = batch["patches"].shape
    rows = batch["patches"].new_zeros(count, tokens + 1, width)
    rows[:, :-1] = batch["patches"]
    grids = (batch["patch_coord"].amax(1) + 1)[:, :, None]
    rows[:, -1, :4] = torch.cat([grids // 256, grids % 256], 2).flatten(1).to(rows.dtype)
    return rows


def rows_of(clip: Any, count: int, shapes: Sequence[tuple[int, int]] = SHAPES) -> Tensor:
    """Returns what the model takes for pictures of these shapes, in turn."""
    pictures = (picture(*shapes[number % len(shapes)], seed=number) for number in range(count))
    return torch.stack([clip.eval_transform(each) for each in pictures])
