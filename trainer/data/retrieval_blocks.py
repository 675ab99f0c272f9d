"""Blocks of images with all of their captions, for retrieval: read, decoded and tokenised in loader processes. See `eval_blocks.py`."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.eval_blocks import Transform, image_block
from trainer.data.pictures import MOST_PIXELS
from trainer.data.processes import load
from trainer.data.sample import Source
from trainer.data.tokens import Tokenizer
from trainer.errors import InputError


class RetrievalBlock(NamedTuple):
    """`block` images in a row, the last block filled up with zeros, and the captions of all of them, image by image."""

    images: Tensor
    """float32 [block, 3, height, width]"""
    valid: int
    tokens: Tensor
    """int64 [captions, context length]"""
    image_of_caption: Tensor
    """int64 [captions]: the image's number in the whole set."""
    digests: Tensor
    """int64 [captions]: equal for captions that read the same."""


def retrieval_blocks(
    source: Source,
    *,
    rank: int,
    world_size: int,
    block: int,
    transform: Transform,
    tokenizer: Tokenizer,
    workers: int,
    most_pixels: int = MOST_PIXELS,
) -> Iterator[RetrievalBlock]:
    """Every `world_size`-th block: any number of images, and no block at all for ranks that none is left for."""
    firsts = range(rank * block, len(source), world_size * block)
    return load(RetrievalBlocks(source, block, transform, tokenizer, most_pixels), firsts, min(workers, len(firsts)), pin_memory=False)


class RetrievalBlocks(Dataset[RetrievalBlock | InputError]):
    """Turns the number of a block's first image into the block, inside a loader process."""

    def __init__(self, source: Source, block: int, transform: Transform, tokenizer: Tokenizer, most_pixels: int) -> None:
        self._source, self._block, self._most_pixels = source, block, most_pixels
        self._transform, self._tokenizer = transform, tokenizer

    def __getitem__(self, first: int) -> RetrievalBlock | InputError:
        try:
            return self._read(first)
        except InputError as error:
            return error

    def _read(self, first: int) -> RetrievalBlock:
        numbers = range(first, min(first + self._block, len(self._source)))
        raws = [self._source.read(number) for number in numbers]
        owned = [(number, caption) for number, raw in zip(numbers, raws, strict=True) for caption in raw.captions]
        captions = [caption for _, caption in owned]
        return RetrievalBlock(
            image_block(raws, self._transform, self._block, self._most_pixels),
            len(raws),
            self._tokenizer(captions),
            torch.tensor([number for number, _ in owned]),
            torch.tensor([_digest(caption) for caption in captions]),
        )


def _digest(caption: str) -> int:
    return int.from_bytes(blake2b(caption.encode(), digest_size=8).digest(), signed=True)
