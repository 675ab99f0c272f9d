"""Pictures as the bytes of a file."""

import io

import numpy as np
from PIL import Image


def picture(red: int, side: int = 8, kind: str = "png") -> bytes:
    """A square of one colour, which has so much red."""
    return encoded(Image.new("RGB", (side, side), (red, 0, 0)), kind)


def noise(seed: int, side: int = 32) -> bytes:
    draw = np.random.default_rng(seed)
    return encoded(Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8)))


def digit(number: int, side: int = 32) -> tuple[bytes, int]:
    """A real picture of a handwritten digit, and which one it is."""
    from sklearn.datasets import load_digits  # which takes a second

    digits = load_digits()
    image = Image.fromarray((digits.images[number] * 15).astype(np.uint8)).resize((side, side))
    return encoded(image), int(digits.target[number])


def encoded(image: Image.Image, kind: str = "png") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()
