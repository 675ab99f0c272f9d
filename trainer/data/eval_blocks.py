"""Blocks of labelled images for evaluation, the same in every world: read, decoded and transformed in loader processes."""

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
"""A picture to float32 [3, height, width]; picklable. Open_clip's own, so that a score is what open_clip finds."""


class EvalBlock(NamedTuple):
    """`block` images in a row, whatever the world: the samples first .. first + valid - 1, then zeros with label -1."""

    images: Tensor
    """float32 [block, 3, height, width]"""
    labels: Tensor
    """int64 [block]"""
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
    """Every `world_size`-th block of `block` samples: any number of samples, and no block at all for ranks that none is left for."""
    firsts = range(rank * block, len(source), world_size * block)
    return load(EvalBlocks(source, block, transform, most_pixels), firsts, min(workers, len(firsts)), pin_memory)


class EvalBlocks(Dataset[EvalBlock | InputError]):
    """Turns the number of a block's first sample into the block, inside a loader process."""

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
        raws = [self._source.read(index) for index in range(first, min(first + self._block, len(self._source)))]
        images = image_block(raws, self._transform, self._block, self._most_pixels)
        labels = torch.full((self._block,), -1)
        labels[: len(raws)] = torch.tensor([raw.label for raw in raws])
        return EvalBlock(images, labels, len(raws), first)


def image_block(raws: Sequence[RawSample], transform: Transform, block: int, most_pixels: int) -> Tensor:
    """float32 [block, 3, height, width]: the samples' pictures, then zeros, so that every block passes the model in the same shape."""
    pictures = torch.stack([transform(decode(raw, most_pixels)) for raw in raws])
    images = pictures.new_zeros(block, *pictures.shape[1:])
    images[: len(raws)] = pictures
    return images
