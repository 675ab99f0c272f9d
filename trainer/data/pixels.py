"""Random crops of training images, as bytes: decoded no larger than needed and resized with antialias.

The device normalises them later. Every choice follows from the position's seed. Resized pixels differ from
Pillow's bicubic antialias by less than 2 of 255 on average. Until it is normalised a pixel has four bytes:
the fourth means nothing, but with it torch resizes in two thirds of the time.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from trainer.data.pictures import AS_SHOWN, ORIENTATION, Decoding, check_size, decode
from trainer.data.sample import RawSample
from trainer.internals import resize_into

TRIES = 10
REDUCTIONS = (8, 4, 2)
"""Factors by which the decoder can shrink an image while it decodes; these have fast paths."""
LEAST_SIDE = 64
"""Side of the smallest result for which a part of any size is cut between the decoder's pixels."""
SOFT_COLOUR = 1.5
"""Ratio of crop to result, per side, from which the decoder may take the nearest colour.

It then does not interpolate the colour; the difference is not visible.
"""
FOUR_BYTES = "RGBX"
"""Red, green, blue and a spare byte, as Pillow and the decoder call it."""
BYTES_OF_A_PIXEL = len(FOUR_BYTES)
_SCAN = b"\xda"
"""Marker behind which a JPEG's pixels begin."""
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
"""Orientation in XMP, by the pattern with which Pillow finds it."""
RGB_COLOURS = ("YCbCr", "RGB", "Gray")


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Part(NamedTuple):
    """A part of an image, and what becomes of it."""

    box: Box
    size: tuple[int, int]
    """Height and width to which it is resized."""
    exact: bool = False
    """True: the decoder gives all pixels as Pillow does. False: it may shrink the image to what `size` needs,
    where the box's edges allow it, and take the nearest colour."""


@dataclass(frozen=True)
class RandomCrop:
    """Crops a sample at random by a seed.

    Returns uint8 [4, height, width], of which the fourth channel is spare. Raises BadSample if the image
    cannot be decoded.
    """

    size: tuple[int, int]
    """Height and width of the result, in pixels."""
    scale: tuple[float, float] = (0.9, 1.0)
    """Share of the image's area that is kept."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width divided by height, before the crop becomes `size`."""
    decoding: Decoding = AS_SHOWN
    change: Callable[[Image.Image, int], Image.Image] | None = None
    """Function from the resized crop in RGB and the seed to other pixels of the same size."""
    of_any_size: bool = False
    """True: the same part of the image is kept, whatever the size of the result."""

    def __call__(self, raw: RawSample, seed: int) -> Tensor:
        out = torch.empty((*self.size, BYTES_OF_A_PIXEL), dtype=torch.uint8).permute(2, 0, 1)
        self.into(raw, seed, out)
        return out

    def into(self, raw: RawSample, seed: int, out: Tensor) -> None:
        """Writes the crop into `out`, uint8 [4, height, width], the bytes of a pixel together in memory."""
        pixels, _ = cut(raw, self.decoding, lambda h, w: Part(self.box(h, w, seed), self.size))
        resize(pixels, out)
        if self.change is not None:
            changed(out, self.change, seed)

    def box(self, height: int, width: int, seed: int) -> Box:
        """Returns the crop, drawn as in torchvision's RandomResizedCrop.

        Area and ratio are drawn; if nothing fits, it is the middle. If the decoder may shrink the image by n,
        edges are multiples of n, since it cannot cut between its pixels.
        """
        box = drawn(height, width, seed, self.scale, self.ratio)
        by = reduction(box, (LEAST_SIDE, LEAST_SIDE) if self.of_any_size else self.size)
        return Box(*(edge // by * by for edge in box))


def cut(
    raw: RawSample, decoding: Decoding, choose: Callable[[int, int], Part]
) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Returns a part of the sample's picture, uint8 [height, width, 4], and the size that it is to have.

    `choose` returns the part for a picture's height and width. Raises BadSample if it cannot be decoded.
    """
    if isinstance(raw.image, bytes) and upright_jpeg(raw.image):
        try:
            return _of_jpeg(raw, raw.image, decoding.most_pixels, choose)
        except ValueError:
            pass  # Pillow decides whether it is too damaged, and why
    pixels = np.array(decode(raw, decoding).convert(FOUR_BYTES))
    part = choose(pixels.shape[0], pixels.shape[1])
    return _cut(pixels, part.box), part.size


def _of_jpeg(
    raw: RawSample, image: bytes, most_pixels: int, choose: Callable[[int, int], Part]
) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Does as `cut`. Raises ValueError if Pillow must decode it."""
    height, width, colours, _ = simplejpeg.decode_jpeg_header(image)
    if colours not in RGB_COLOURS:
        raise ValueError(f"{colours} needs a conversion of colours")
    check_size(raw, width, height, most_pixels)
    box, size, exact = choose(height, width)
    by = 1 if exact else reduction(box, size)
    soft = not exact and min(box.height / size[0], box.width / size[1]) >= SOFT_COLOUR
    pixels = decoded_jpeg(image, -(-height // by), -(-width // by), soft=soft)
    return _cut(pixels, Box(*(edge // by for edge in box))), size


def drawn(
    height: int,
    width: int,
    seed: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    times: float = 1.0,
) -> Box:
    """Returns a random part of an image: share of its area, then width divided by height over `times`."""
    draw = random.Random(seed)
    for _ in range(TRIES):
        area = height * width * draw.uniform(*scale)
        aspect = times * math.exp(draw.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            # randrange is not used: its use of the stream may change between versions of Python.
            return Box(int(draw.random() * (height - h + 1)), int(draw.random() * (width - w + 1)), h, w)
    w = min(width, max(1, round(height * times * ratio[1])))
    h = min(height, max(1, round(width / (times * ratio[0]))))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def changed(image: Tensor, change: Callable[[Image.Image, int], Image.Image], seed: int) -> None:
    """Changes the colours of uint8 [4, height, width] in place, the bytes of a pixel together in memory."""
    pixels = image[:3].permute(1, 2, 0).numpy()
    pixels[...] = np.asarray(change(Image.fromarray(pixels), seed))


def reduction(box: Box, size: tuple[int, int]) -> int:
    """Returns the factor by which the decoder may shrink the image with the crop still at least `size`."""
    return next((by for by in REDUCTIONS if box.height // by >= size[0] and box.width // by >= size[1]), 1)


def decoded_jpeg(image: bytes, height: int, width: int, *, soft: bool) -> NDArray[np.uint8]:
    """Returns uint8 [height, width, 4]; `soft` takes the nearest colour. Raises ValueError if it cannot.

    Height and width are those of the image, or of the image at one of the REDUCTIONS, rounded up.
    """
    # To an address that 32 divides, libjpeg-turbo writes past the caches, and the crop would have to come
    # from main memory. No pixel of four bytes has such an address if the first byte's is odd.
    memory = np.empty(height * width * BYTES_OF_A_PIXEL + 1, dtype=np.uint8)[1:]
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
        image, FOUR_BYTES, fastupsample=soft, min_height=height, min_width=width, buffer=memory
    )
    return pixels


def resize(pixels: NDArray[np.uint8], out: Tensor) -> None:
    """Resizes uint8 [height, width, 4] into `out`, uint8 [4, new height, new width]: bicubic with antialias.

    The bytes of a pixel lie together in both.
    """
    # It takes whole rows, and a batch dimension that torch sees as channels last: any other layout takes half
    # as long again.
    image = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)
    resize_into(image, out[None])


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Turns uint8 [N, 3 or 4, H, W] into [N, 3, H, W] of the type and device of `mean` [3].

    The values are those of ToTensor and Normalize.
    """
    return (
        images[:, :3]
        .to(mean.dtype, memory_format=torch.contiguous_format)
        .div_(255)
        .sub_(mean[:, None, None])
        .div_(std[:, None, None])
    )


def upright_jpeg(image: bytes) -> bool:
    """Returns whether it is a JPEG that is not turned: by EXIF or, without an orientation there, by XMP."""
    at, xmp = 2 if image.startswith(b"\xff\xd8") else len(image), b""
    while image[at : at + 1] == b"\xff" and (marker := image[at + 1 : at + 2]) not in (_SCAN, b""):
        if marker == b"\xff":  # any number of them may stand before a marker
            at += 1
            continue
        end = at + 2 + int.from_bytes(image[at + 2 : at + 4])
        if marker == b"\xe1" and image[at + 4 : at + 10] == b"Exif\0\0":
            if (found := _orientation(image[at + 4 : end])) is not None:
                return found == 1
        elif marker == b"\xe1" and image.startswith(_XMP, at + 4):
            xmp = image[at + 4 : end]
        at = end
    turned = _XMP_ORIENTATION.search(xmp)
    return image.startswith(b"\xff" + _SCAN, at) and (turned is None or turned[1] == b"1")


def _orientation(exif: bytes) -> object:
    tags = Image.Exif()
    try:
        tags.load(exif)
        return tags.get(ORIENTATION)
    except Exception:  # damaged metadata is no reason to lose the image
        return None


def _cut(pixels: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]
