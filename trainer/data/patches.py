"""Pictures of any shape as patches, for image towers that take them (NaFlex, arXiv 2502.14786).

A picture keeps its shape: it is resized so that its patches are as many as fit into a budget. It travels as
rows of bytes: one row for each patch of the budget, in reading order, with zeros behind the last patch, and
one more row that begins with the rows and columns of the grid, two bytes each. So a batch is one tensor
whatever the pictures' shapes. Sizes and order are those of timm, whose transforms open_clip uses.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from PIL import Image
from timm.data.naflex_transforms import get_image_size_for_seq
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.nn import functional

from trainer.data.pictures import AS_SHOWN, Decoding
from trainer.data.pixels import BYTES_OF_A_PIXEL, Part, changed, cut, drawn, resize
from trainer.data.sample import BadSample, RawSample

_CHANNELS = 3
_GRID_BYTES = 4
_BYTE = 256


@dataclass(frozen=True)
class Budget:
    """Patches of a picture."""

    tokens: int
    """Most patches of a picture."""
    patch: tuple[int, int]
    """Height and width of a patch in pixels."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a picture's rows."""
        return self.tokens + 1, self.patch[0] * self.patch[1] * _CHANNELS

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the size to which timm resizes a picture; raises ValueError if it is too narrow."""
        _, size = get_image_size_for_seq((height, width), self.patch, self.tokens)
        return int(size[0]), int(size[1])


@dataclass(frozen=True)
class PatchCrop:
    """Crops a sample at random by a seed, as timm's RandomResizedCropToSequence, and cuts it into patches.

    Returns uint8 rows. Raises BadSample if the image cannot be decoded.
    """

    budget: Budget
    scale: tuple[float, float] = (0.9, 1.0)
    """Share of the image's area that is kept."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width divided by height of the crop, over that of the image."""
    decoding: Decoding = AS_SHOWN
    change: Callable[[Image.Image, int], Image.Image] | None = None
    """Function from the resized crop in RGB and the seed to other pixels of the same size."""

    def __call__(self, raw: RawSample, seed: int) -> Tensor:
        out = torch.empty(self.budget.shape, dtype=torch.uint8)
        self.into(raw, seed, out)
        return out

    def into(self, raw: RawSample, seed: int, out: Tensor) -> None:
        """Writes the rows into `out`."""

        def choose(height: int, width: int) -> Part:
            try:
                return self.part(height, width, seed)
            except ValueError as error:
                what = f"the image has {width} x {height} pixels, which make no patches"
                raise BadSample(raw.origin, raw.key, "odd shape", what) from error

        pixels, size = cut(raw, self.decoding, choose)
        image = torch.empty((*size, BYTES_OF_A_PIXEL), dtype=torch.uint8).permute(2, 0, 1)
        resize(pixels, image)
        if self.change is not None:
            changed(image, self.change, seed)
        _to_rows(image[:_CHANNELS], self.budget.patch, out)

    def part(self, height: int, width: int, seed: int) -> Part:
        """Returns the crop, as timm draws it, with the size to which it is resized."""
        box = drawn(height, width, seed, self.scale, self.ratio, times=width / height)
        return Part(box, self.budget.size(box.height, box.width), exact=True)


@dataclass(frozen=True)
class DrawnCrop:
    """Crops that differ between global batches: each draws one of them for all of its samples."""

    crops: tuple[PatchCrop, ...]
    weights: tuple[float, ...]
    """Weights by which they are drawn, above 0."""

    @property
    def most_bytes(self) -> int:
        """Bytes of the rows of one sample by the crop that has the most."""
        return max(rows * width for rows, width in (crop.budget.shape for crop in self.crops))

    def of_batch(self, seed: int) -> PatchCrop:
        """Returns the crop of the global batch with this seed of 63 bits."""
        ends = list(accumulate(self.weights))
        return self.crops[bisect_right(ends, (seed >> 10) / 2**53 * ends[-1])]


@dataclass(frozen=True)
class PatchTransform:
    """timm's transform for evaluation: a picture as float32 rows, normalised."""

    budget: Budget
    timm: Callable[[Image.Image], Any]

    def __call__(self, picture: Image.Image) -> Tensor:
        found = self.timm(picture)
        rows = torch.zeros(self.budget.shape)
        rows[: len(found["patches"])] = found["patches"]
        _put_grid(rows, *(found["patch_coord"][-1] + 1).tolist())
        return rows


def eval_patches(budget: Budget, **preprocessing: Any) -> PatchTransform:
    """Returns the transform with timm's values of `mean`, `std` and `interpolation`."""
    timm = create_transform(
        (_CHANNELS, *budget.patch),
        naflex=True,
        patchify=True,
        patch_size=budget.patch,
        max_seq_len=budget.tokens,
        **preprocessing,
    )
    return PatchTransform(budget, timm)


def normalised_patches(rows: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Turns uint8 rows [N, T + 1, P] into those of the type and device of `mean` [3]; padding stays zero.

    The values are those of ToTensor and Normalize.
    """
    out = rows.to(mean.dtype)
    pixels = rows.shape[2] // _CHANNELS
    patches = out[:, :-1].div_(255).sub_(mean.repeat(pixels)).div_(std.repeat(pixels))
    patches.masked_fill_(~_grids(out)[1][..., None], 0)
    return out


@dataclass(frozen=True)
class Fitted:
    """Normalises rows as `normalised_patches` does, and fits patches of any size to the tower's embedding.

    FlexiViT resamples the embedding's weights to the size of the patches (arXiv 2212.08013). That is linear:
    those weights times a patch are the weights themselves times what this makes of the patch.
    """

    patch: tuple[int, int]
    """Height and width of the tower's patches."""
    mode: str
    """Interpolation by which timm resamples the weights: bicubic or bilinear."""

    def __call__(self, rows: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        out = normalised_patches(rows, mean, std)
        edge = math.isqrt(rows.shape[2] // _CHANNELS)
        if (edge, edge) == self.patch:
            return out
        down, across = (_unresized(own, edge, self.mode, out.dtype, out.device) for own in self.patch)
        pixels = out[:, :-1].unflatten(2, (edge, edge, _CHANNELS))
        patches = torch.einsum("ntijc,ai,bj->ntabc", pixels, down, across).flatten(2)
        grids = patches.new_zeros(len(out), 1, patches.shape[2])
        grids[:, 0, :_GRID_BYTES] = out[:, -1, :_GRID_BYTES]
        return torch.cat([patches, grids], dim=1)


@cache
def _unresized(own: int, edge: int, mode: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the pseudoinverse of what resizes `own` pixels in a line to `edge`, [own, edge]."""
    lines = torch.eye(own, dtype=torch.float64)[None, None]
    resized = functional.interpolate(lines, size=(edge, own), mode=mode, antialias=True)
    inverse: Tensor = torch.linalg.pinv(resized[0, 0])
    return inverse.to(device, dtype)


def tower_input(rows: Tensor) -> dict[str, Tensor]:
    """Returns what timm's NaFlexVit takes of normalised rows [N, T + 1, P]: patches, coordinates, mask."""
    coordinates, valid = _grids(rows)
    return {"patches": rows[:, :-1], "patch_coord": coordinates, "patch_valid": valid}


def _grids(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the patches' rows and columns, int64 [N, T, 2], and which there are, bool [N, T].

    Rows of zeros alone, which fill up a block, count as one black patch: attention to nothing is not finite.
    """
    # Bytes are whole in any floating type; a number of two bytes would not be in bfloat16.
    high_low = rows[:, -1, :_GRID_BYTES].long()
    height, width = (
        (high_low[:, at, None] * _BYTE + high_low[:, at + 1, None]).clamp(min=1) for at in (0, 2)
    )
    index = torch.arange(rows.shape[1] - 1, device=rows.device)[None]
    valid = index < height * width
    coordinates = torch.stack([index.div(width, rounding_mode="floor"), index % width], dim=2)
    return coordinates * valid[..., None], valid


def _to_rows(image: Tensor, patch: tuple[int, int], out: Tensor) -> None:
    """Writes uint8 [3, height, width], whose edges are multiples of a patch's, into rows."""
    height, width = image.shape[1] // patch[0], image.shape[2] // patch[1]
    cells = image.permute(1, 2, 0).unflatten(0, (height, patch[0])).unflatten(2, (width, patch[1]))
    out[: height * width].view(height, width, *patch, _CHANNELS).copy_(cells.transpose(1, 2))
    out[height * width :] = 0
    _put_grid(out, height, width)


def _put_grid(rows: Tensor, height: int, width: int) -> None:
    rows[-1, :_GRID_BYTES] = torch.tensor([*divmod(height, _BYTE), *divmod(width, _BYTE)])
