"""Augmentation after the crop: torchvision's and open_clip's own functions are what it must equal."""

import random
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import ColorJitter, RandAugment

from trainer.config.augment import Augment
from trainer.data.augment import augmentation

JITTER = (0.4, 0.3, 0.2, 0.1)
OWN_STREAM, ERASING_STREAM = 2**63, 2**64
"""What is added to a sample's seed: a run resumed with another release must draw the same."""


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def seeds(count: int) -> list[int]:
    draw = random.Random(0)
    return [draw.getrandbits(63) for _ in range(count)]


def same(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


class Drawn(ColorJitter):  # type: ignore[misc]
    """torchvision's class with the values and the order that ours draws from a seed."""

    def __init__(self, values: tuple[float, float, float, float], draw: random.Random) -> None:
        super().__init__(*values)
        self._values, self._draw = values, draw

    def forward(self, img: Image.Image) -> Any:
        factors = [self._draw.uniform(max(0.0, 1 - each), 1 + each) for each in self._values[:3]]
        factors.append(self._draw.uniform(-self._values[3], self._values[3]))
        order = sorted(range(4), key=lambda _: self._draw.random())
        limits = (self.brightness, self.contrast, self.saturation, self.hue)
        for factor, limit in zip(factors, limits, strict=True):
            assert limit is None or limit[0] <= factor <= limit[1], "within what torchvision draws from"
        drawn = [None if limit is None else factor for factor, limit in zip(factors, limits, strict=True)]
        self.get_params = lambda *_: (torch.tensor(order), *drawn)
        return super().forward(img)


def changes(**settings: Any) -> Any:
    return augmentation(Augment(**settings))


@pytest.mark.parametrize("values", [JITTER, (0.5, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.5), (2.0, 2.0, 2.0, 0.5)])
def test_open_clips_classes_do_the_same_with_the_same_draws(
    picture: Image.Image, monkeypatch: pytest.MonkeyPatch, values: tuple[float, float, float, float]
) -> None:
    theirs = [open_clip.transform.color_jitter(*values, p=0.5), open_clip.transform.gray_scale(p=0.5)]
    ours = changes(color_jitter=values, color_jitter_prob=0.5, gray_scale_prob=0.5)
    kinds = set()
    for seed in seeds(40):
        draw = random.Random(seed + OWN_STREAM)
        monkeypatch.setattr(open_clip.transform.random, "random", draw.random)
        theirs[0].transf = Drawn(values, draw)
        expected = theirs[1](theirs[0](picture))
        assert same(ours(picture, seed), expected)
        kinds.add((same(expected, picture), np.ptp(np.asarray(expected), axis=2).max() == 0))
    assert len(kinds) == 3, "unchanged, changed, and gray"


def test_rand_augment_is_torchvisions(picture: Image.Image) -> None:
    ours = changes(rand_augment_ops=2, rand_augment_magnitude=12)
    pictures = []
    for seed in seeds(20):
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        expected = RandAugment(2, 12)(picture)
        torch.set_rng_state(before)
        pictures.append(ours(picture, seed))
        assert same(pictures[-1], expected)
        assert torch.equal(torch.get_rng_state(), before), "torch's generator goes on as if nothing was drawn"
    assert len({np.asarray(each).tobytes() for each in pictures}) > 10


@pytest.mark.parametrize("count", [1, 3])
def test_timms_rectangles_are_filled_with_noise(picture: Image.Image, count: int) -> None:
    ours = changes(erase_prob=0.5, erase_count=count)
    theirs = RandomErasing(0.5, mode="pixel", max_count=count, device="cpu")
    changed = []
    for seed in seeds(60):
        random.seed(seed + ERASING_STREAM)
        left = theirs(torch.zeros(3, picture.height, picture.width))[0].numpy() == 0
        random.seed(3)
        after, before = np.asarray(ours(picture, seed)), np.asarray(picture)
        assert random.random() == random.Random(3).random(), (
            "Python's generator goes on as if nothing was drawn"
        )
        assert np.array_equal(after[left], before[left])
        noise = after[~left]
        assert np.mean(noise == before[~left]) < 0.1 if noise.size > 500 else True
        changed.append(noise)
        assert same(ours(picture, seed), Image.fromarray(after))
    assert 15 < sum(noise.size > 0 for noise in changed) < 45
    assert np.concatenate(changed).mean() == pytest.approx(127.5, abs=2)
