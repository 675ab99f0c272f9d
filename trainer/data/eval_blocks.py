"""Blocks of labelled images for evaluation, the same for any number of ranks.

Loader processes read, decode and transform the images.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.pictures import MOST_PIXELS, decode
from trainer.data.processes import load
from trainer.data.sample import RawSample, Source
from trainer.errors import InputError

Transform = Callable[[Image.Image], Tensor]
"""Function from a picture to float32 [3, height, width]; picklable.

It is open_clip's own, so that scores equal open_clip's.
"""


class EvalBlock(NamedTuple):
    """A block of `block` consecutive images, the same for any number of ranks.

    It holds the samples first .. first + valid - 1, then zeros with label -1.
    """

    images: Tensor
    """Pixels, float32 [block, 3, height, width]."""
    labels: Tensor
    """Class numbers, int64 [block]."""
    valid: int
    first: int


def eval_blocks(
    source: Source,
    *,
    rank: int,
    world_size: int,
    block: int,
    transform: Transform,
    workers: int,
    most_pixels: int = MOST_PIXELS,
    pin_memory: bool = False,
) -> Iterator[EvalBlock]:
    """Yields this rank's blocks of `block` samples: every `world_size`-th one.

    Any number of samples will do; a rank for which no block is left yields none.
    """
    firsts = range(rank * block, len(source), world_size * block)
    return load(
        EvalBlocks(source, block, transform, most_pixels), firsts, min(workers, len(firsts)), pin_memory
    )


class EvalBlocks(Dataset[EvalBlock | InputError]):
    """Reads the block that begins with a given sample number, inside a loader process."""

    def __init__(self, source: Source, block: int, transform: Transform, most_pixels: int) -> None:
        self._source = source
        self._block = block
        self._transform = transform
        self._most_pixels = most_pixels

    def __getitem__(self, first: int) -> EvalBlock | InputError:
        try:
            return self._read(first)
        except InputError as error:
            return error

    def _read(self, first: int) -> EvalBlock:
        raws = [
            self._source.read(index) for index in range(first, min(first + self._block, len(self._source)))
        ]
        images = image_block(raws, self._transform, self._block, self._most_pixels)
        labels = torch.full((self._block,), -1)
        labels[: len(raws)] = torch.tensor([raw.label for raw in raws])
        return EvalBlock(images, labels, len(raws), first)


def image_block(raws: Sequence[RawSample], transform: Transform, block: int, most_pixels: int) -> Tensor:
    """Returns the samples' pictures, then zeros: float32 [block, 3, height, width].

    All blocks pass the model in the same shape.
    """
    pictures = torch.stack([transform(decode(raw, most_pixels)) for raw in raws])
    images = pictures.new_zeros(block, *pictures.shape[1:])
    images[: len(raws)] = pictures
    return images
