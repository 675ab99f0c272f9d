"""Small pictures as the bytes of a file."""

import io

import numpy as np
from PIL import Image


def picture(red: int, side: int = 8, kind: str = "png") -> bytes:
    """A square of one colour, which has so much red."""
    return _content(Image.new("RGB", (side, side), (red, 0, 0)), kind)


def noise(seed: int, side: int = 32) -> bytes:
    draw = np.random.default_rng(seed)
    return _content(Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8)), "png")


def _content(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()
