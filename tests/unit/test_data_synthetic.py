"""Synthetic samples: a function of the number, and different enough to be learnt."""

import numpy as np
import pytest

from trainer.config import Data
from trainer.data.source import open_source


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
