"""Data set of `make demo`: 1,797 real images of handwritten digits, packed into shards.

Imports scikit-learn, and no torch. Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten
Digits", UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49, licence CC BY 4.0: its test
set as scikit-learn ships it, 8 x 8 pixels of 17 grey levels. The images are enlarged here.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainer.data.pack import PackedSample, write_shards
from trainer.safe_io.folders import whole_folder

CLASS_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a handwritten {}",
    "the digit {} written by hand",
    "a scan of the digit {}",
    "somebody wrote the number {}",
    "a small grey picture of the number {}",
)
SIDE = 32
GREY_LEVELS = 16
HELD_OUT_EVERY = 5
SAMPLES_PER_SHARD = 256


@dataclass(frozen=True)
class DigitSet:
    """Patterns of the packed digits' shards."""

    train: str
    held_out: str


def pack_digits(out: Path) -> DigitSet:
    """Pack the digits into `out` once, whole or not at all.

    Samples have the members `png`, `txt` (all captions) and `cls`; every fifth sample of each digit is held
    out.
    """
    if not out.exists():
        images, labels = _digits()
        held_out = _every_fifth_of_each(labels)
        with whole_folder(out) as folder:
            for name, chosen in (("train", ~held_out), ("held-out", held_out)):
                (folder / name).mkdir()
                write_shards(
                    _samples(images, labels, np.flatnonzero(chosen).tolist()),
                    folder / name,
                    SAMPLES_PER_SHARD,
                )
    train, held_out_pattern = (str(out / name / "*.tar") for name in ("train", "held-out"))
    return DigitSet(train, held_out_pattern)


def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns images [1797, 8, 8] with values from 0 to 16, and labels [1797]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images, digits.target


def _every_fifth_of_each(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns bool [samples] that selects the same share of each class, without random numbers."""
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]] = True
    return chosen


def _samples(
    images: NDArray[np.float64], labels: NDArray[np.int64], numbers: Sequence[int]
) -> Iterator[PackedSample]:
    for number in numbers:
        name = CLASS_NAMES[labels[number]]
        captions = "".join(template.format(name) + "\n" for template in TEMPLATES)
        yield (
            f"digit-{number:04d}",
            {"png": _png(images[number]), "txt": captions.encode(), "cls": str(labels[number]).encode()},
        )


def _png(image: NDArray[np.float64]) -> bytes:
    grey = np.round(image * (255 / GREY_LEVELS)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "png")
    return file.getvalue()
