"""Random changes of a training image after the crop: torchvision's and timm's, in open_clip's order.

They work on bytes. Every choice follows from the seed. RandAugment draws from torch's generator of the CPU
and the erasing from Python's, which are set for them and put back; everything else draws from a generator of
its own.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import RandAugment
from torchvision.transforms import functional as F

from trainer.config.augment import Augment

_OWN_STREAM = 2**63
"""Added to the seed, since the crop draws from the seed itself."""
_ERASING_STREAM = 2**64
"""The same for erasing, which draws from a generator of its own."""


@dataclass(frozen=True)
class Augmentation:
    """Function from a picture in RGB and a seed to the changed picture of the same size."""

    settings: Augment

    def __call__(self, picture: Image.Image, seed: int) -> Image.Image:
        draw, settings = random.Random(seed + _OWN_STREAM), self.settings
        if settings.rand_augment_ops:
            with seeded(seed):
                picture = RandAugment(settings.rand_augment_ops, settings.rand_augment_magnitude)(picture)
        if draw.random() < settings.color_jitter_prob:
            picture = jittered(picture, settings.color_jitter, draw)
        if draw.random() < settings.gray_scale_prob:
            picture = F.to_grayscale(picture, num_output_channels=3)
        return erased(picture, settings, seed) if settings.erase_prob else picture


def augmentation(settings: Augment) -> Augmentation | None:
    """Returns the function that the job asks for; None if it leaves the pixels of the crop as they are."""
    return Augmentation(settings) if settings.changes_pixels else None


def jittered(
    picture: Image.Image, most: tuple[float, float, float, float], draw: random.Random
) -> Image.Image:
    """Returns the picture with other brightness, contrast, saturation and hue, changed in a random order.

    The values are drawn as torchvision's ColorJitter draws them.
    """
    brightness, contrast, saturation = (draw.uniform(max(0.0, 1 - each), 1 + each) for each in most[:3])
    hue = draw.uniform(-most[3], most[3])
    changes: list[tuple[float, Callable[[Image.Image], Image.Image]]] = [
        (most[0], lambda before: F.adjust_brightness(before, brightness)),
        (most[1], lambda before: F.adjust_contrast(before, contrast)),
        (most[2], lambda before: F.adjust_saturation(before, saturation)),
        (most[3], lambda before: F.adjust_hue(before, hue)),
    ]
    for strength, change in sorted(changes, key=lambda _: draw.random()):
        if strength:
            picture = change(picture)
    return picture


def erased(picture: Image.Image, settings: Augment, seed: int) -> Image.Image:
    """Returns the picture with timm's rectangles in it, if any are drawn.

    They hold uniform noise, as in the paper. timm draws a normal one, which bytes would cut off.
    """
    left = torch.ones(1, picture.height, picture.width)
    before = random.getstate()
    random.seed(seed + _ERASING_STREAM)
    try:
        RandomErasing(settings.erase_prob, max_count=settings.erase_count, device="cpu")(left)
    finally:
        random.setstate(before)
    gone = left[0].numpy() == 0
    if not gone.any():
        return picture
    pixels = np.array(picture)
    pixels[gone] = np.random.default_rng(seed).integers(256, size=(gone.sum(), 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Lets torch's generator of the CPU draw by the seed, and puts it back afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
