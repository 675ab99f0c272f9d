"""Positions of patches of images of any shape: timm's table, interpolated on the device for each patch.

timm interpolates the table once for each grid of a batch, for which the host asks the device twice for every
image, and waits. Here a patch's position is the table times weights of rows and columns, the same ones with
which torch's interpolation with antialias sums up the table.
"""

from collections.abc import Callable, Mapping

import torch
from timm.models.naflexvit import NaFlexEmbeds
from torch import Tensor


class DevicePositions(NaFlexEmbeds):
    """Embedding of patches that waits for no device; positions are in the precision of the table."""

    def _apply_learned_naflex_pos_embed(self, x: Tensor, patch_coord: Tensor) -> None:
        """Adds the positions to `x`, [B, T, width], in place."""
        table = self.pos_embed
        assert table is not None
        table_HWD = table[0]
        grid_B2, weigh = patch_coord.amax(1) + 1, _FILTERS[self.pos_embed_interp_mode]
        rows_BTH, columns_BTW = (
            _weights(patch_coord[..., axis], grid_B2[:, axis, None], length, weigh, table.dtype)
            for axis, length in enumerate(table_HWD.shape[:2])
        )
        of_cells_BTC = (rows_BTH[..., None] * columns_BTW[..., None, :]).flatten(2)
        with torch.autocast(x.device.type, enabled=False):
            positions_BTD = of_cells_BTC @ table_HWD.flatten(0, 1)
        x += positions_BTD.to(x.dtype)


def can_be_weighed(embeds: NaFlexEmbeds) -> bool:
    """Returns whether the positions are such a sum: a table that is interpolated with antialias."""
    others = ("ar_preserving", "align_corners", "use_grid_sample")
    return (
        embeds.pos_embed_type == "learned"
        and embeds.pos_embed_interp_mode in _FILTERS
        # Before they were settings, timm had antialias and no aligned corners.
        and getattr(embeds, "pos_embed_antialias", True)
        and not any(getattr(embeds, f"pos_embed_{name}", False) for name in others)
    )


def _weights(
    at_BT: Tensor, size_B1: Tensor, length: int, weigh: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """Returns the weights of `length` places of a table at places of an axis of `size`, [B, T, length]."""
    scale_B1 = length / size_B1.to(dtype)
    centre_BT1 = (scale_B1 * (at_BT + 0.5))[..., None]
    places_L = torch.arange(length, device=at_BT.device, dtype=dtype) + 0.5
    weights_BTL = weigh((places_L - centre_BT1) / scale_B1.clamp(min=1)[..., None])
    return weights_BTL / weights_BTL.sum(-1, keepdim=True)


def _triangle(distance: Tensor) -> Tensor:
    return (1 - distance.abs()).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    """Cubic convolution with a = -0.5 (Keys, 1981), as Pillow and torch's antialias have it."""
    x = distance.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


_FILTERS: Mapping[str, Callable[[Tensor], Tensor]] = {"bilinear": _triangle, "bicubic": _cubic}
