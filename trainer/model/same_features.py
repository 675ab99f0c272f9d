"""Compares a model with what another program makes of its exported form.

A form is right if the other program computes the same features: of the same pixels, of the same pictures and
of the same captions. No list of what a program lacks says that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainer.data.tokens import PLAIN_CAPTIONS
from trainer.errors import InputError
from trainer.model.build import Clip

_ODD = (
    "“A dog’s” day – it’s…",  # noqa: RUF001
    "ﬁne ＡＢＣ！",  # noqa: RUF001
    "图片，一只“猫”。",  # noqa: RUF001
    "Cafe\u0301",
    " two\n\tlines\u00a0",
    "salt &amp; pepper",
    "it's 2,048 x 3.5",
    "a caption that has no end " * 60,
    "",
)
"""Captions that programs clean in other ways: quotes, ligatures, wide letters, accents, white space, HTML."""
_FEATURES = 1e-3
"""Most that features may differ, as a share of their length; float32 differs by some 1e-6."""
_LEVELS = 1.0
"""Most that pixels may differ on average, in levels of 255: interpolations round differently."""
_OWN_TRANSFORM = (
    "the transform that open_clip returns makes images of one size: for any shape, give the model patches "
    "by timm's create_transform(..., naflex=True, patchify=True)"
)
_SMOOTH = 8
_SHIFTS = ((0, 0), *((rows, columns) for rows in (0, 1, -1) for columns in (0, 1, -1) if rows or columns))


@dataclass(frozen=True)
class Reading:
    """An exported model as another program reads it."""

    image: Callable[[Tensor], Tensor]
    """Features of pixels, float32 [n, 3, height, width]."""
    text: Callable[[Any], Tensor]
    """Features of what `tokens` returns, or of our tokens without it."""
    pixels: Callable[[Image.Image], Tensor] | None = None
    """Pixels [3, height, width] of a picture; None if the form says nothing about pictures."""
    tokens: Callable[[list[str]], Any] | None = None
    """Tokens of captions; None if the form has no tokenizer of its own."""


@torch.no_grad()
def differences(clip: Clip, there: Reading) -> list[str]:
    """Returns a clause for each way in which the other program's features are not those of the model."""
    clip.model.eval()
    return [
        *_of_pixels(clip, there),
        *(_of_pictures(clip, there.pixels) if there.pixels and clip.images.one_size else ()),
        *_of_captions(clip, there),
    ]


def refuse_differences(clip: Clip, there: Reading, form: str, program: str) -> tuple[str, ...]:
    """Raises InputError if the other program computes other features; returns what else there is to know."""
    if found := differences(clip, there):
        other = "" if form == "open_clip" else "; --to open_clip takes every model"
        raise InputError(
            f"--to {form}: {program} would make another model of this one: {'; '.join(found)}. Nothing of it "
            f"is kept{other}"
        )
    if not clip.images.one_size:
        return (_OWN_TRANSFORM,)
    shifted = there.pixels and any(shift != (0, 0) for _, shift, _ in _compared(clip, there.pixels))
    note = f"{program} crops some pictures one pixel beside where Clipship and open_clip do: it rounds down"
    return (note,) if shifted else ()


def _of_pixels(clip: Clip, there: Reading) -> Iterator[str]:
    if clip.images.one_size:
        pixels = torch.randn(2, *clip.images.input_shape, generator=torch.Generator().manual_seed(0))
    else:
        pixels = torch.stack([clip.eval_transform(_picture(*size)) for size in ((90, 60), (40, 110))])
    own = clip.model.encode_image(pixels)  # type: ignore[operator]
    share = _distance(own, there.image(clip.images.of_open_clip(pixels)))
    if share > _FEATURES:
        yield f"its features of the same pixels differ by {share:.1%}"


def _of_pictures(clip: Clip, pixels: Callable[[Image.Image], Tensor]) -> Iterator[str]:
    for levels, _, name in _compared(clip, pixels):
        if not levels <= _LEVELS:
            yield f"its pixels of {name} differ by {levels:.1f} levels of 255 on average"
            return


def _compared(
    clip: Clip, pixels: Callable[[Image.Image], Tensor]
) -> Iterator[tuple[float, tuple[int, int], str]]:
    """Yields how far the pixels of a picture are from ours, the shift with which, and the picture's size.

    A shift is one pixel at most, of rows and columns: programs round the middle of a picture in other ways.
    """
    height, width = clip.images.size
    for size in ((2 * width + 1, height + 7), (width - 9, 2 * height + 3), (width + 3, height)):
        ours, theirs = clip.eval_transform(_picture(*size)), pixels(_picture(*size))
        name = f"pictures of {size[0]} x {size[1]}"
        if ours.shape != theirs.shape:
            yield float("inf"), (0, 0), f"{name}, which are {list(theirs.shape)} and not {list(ours.shape)},"
            continue
        std = torch.tensor(clip.std)[:, None, None]
        found = {shift: float((_apart(ours, theirs, *shift) * std).mean() * 255) for shift in _SHIFTS}
        best = min(found, key=lambda shift: (found[shift] > _LEVELS, _SHIFTS.index(shift)))
        yield found[best], best, name


def _apart(ours: Tensor, theirs: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the distance of each pixel but those of the border, one picture being moved."""
    moved = torch.roll(theirs, (rows, columns), dims=(-2, -1))
    return (ours - moved).abs()[..., 1:-1, 1:-1]


def _of_captions(clip: Clip, there: Reading) -> Iterator[str]:
    encode: Any = clip.model.encode_text
    for captions in (PLAIN_CAPTIONS, _ODD) if there.tokens else (PLAIN_CAPTIONS,):
        for caption in captions:
            own = clip.tokenizer([caption])
            theirs = there.tokens([caption]) if there.tokens else own
            share = _distance(encode(own), there.text(theirs))
            if share > _FEATURES:
                yield f"its features of the caption {_short(caption)} differ by {share:.1%}"
                return


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns the largest distance of two rows of unit length; infinity if the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    rows = (torch.nn.functional.normalize(features.float(), dim=-1) for features in (ours, theirs))
    ours, theirs = rows
    distance = float((ours - theirs).norm(dim=-1).max())
    return distance if distance == distance else float("inf")


def _picture(width: int, height: int) -> Image.Image:
    """Returns a smooth random picture."""
    coarse = max(2, height // _SMOOTH), max(2, width // _SMOOTH), 3
    noise = np.random.default_rng(0).integers(0, 256, coarse, dtype=np.uint8)
    return Image.fromarray(noise).resize((max(1, width), max(1, height)), Image.Resampling.BICUBIC)


def _short(caption: str) -> str:
    return repr(caption if len(caption) <= 30 else f"{caption[:30]}...")
