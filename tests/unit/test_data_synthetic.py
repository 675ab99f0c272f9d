"""Synthetic samples: a function of the number, and different enough to be learnt."""

import numpy as np
import pytest

from trainer.config import Data
from trainer.data.source import open_source


def test_what_a_caption_says_is_what_the_picture_shows() -> None:
    """Pictures of one caption differ only by noise below 64.

    Pictures of different captions differ in the shape's pixels.
    """
    source = open_source(Data(format="synthetic", synthetic_samples=200))
    samples = [source.read(number) for number in range(200)]
    assert len({sample.captions for sample in samples}) == 100
    flat = np.stack([np.asarray(sample.image, dtype=np.int16).ravel() for sample in samples])
    distance = np.abs(flat[:100, None] - flat[None, 100:]).max(-1)
    assert (distance.diagonal() < 64).all()
    assert (distance[~np.eye(100, dtype=bool)] > 64).all()


def test_pictures_are_rgb_bytes() -> None:
    image, same = (
        open_source(Data(format="synthetic", synthetic_samples=count)).read(0).image for count in (1, 150)
    )
    assert np.array_equal(np.asarray(image), np.asarray(same)), "a sample follows from its number alone"
    assert isinstance(image, np.ndarray)
    assert image.shape == (64, 64, 3)
    assert image.dtype == np.uint8
    with pytest.raises(IndexError):
        open_source(Data(format="synthetic", synthetic_samples=1)).read(1)
