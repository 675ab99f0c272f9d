"""Blocks of images with all of their captions, for retrieval.

Loader processes read, decode and tokenise them. See `eval_blocks.py`.
"""

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
    """A block of `block` consecutive images and all of their captions, image by image.

    The last block is filled up with zeros.
    """

    images: Tensor
    """Pixels, float32 [block, 3, height, width]."""
    valid: int
    tokens: Tensor
    """Token ids, int64 [captions, context length]."""
    image_of_caption: Tensor
    """Number of each caption's image in the whole set, int64 [captions]."""
    digests: Tensor
    """Digests of the captions, int64 [captions]; equal captions have equal digests."""


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
    """Yields this rank's blocks: every `world_size`-th one.

    Any number of images will do; a rank for which no block is left yields none.
    """
    firsts = range(rank * block, len(source), world_size * block)
    return load(
        RetrievalBlocks(source, block, transform, tokenizer, most_pixels),
        firsts,
        min(workers, len(firsts)),
        pin_memory=False,
    )


class RetrievalBlocks(Dataset[RetrievalBlock | InputError]):
    """Reads the block that begins with a given image number, inside a loader process."""

    def __init__(
        self, source: Source, block: int, transform: Transform, tokenizer: Tokenizer, most_pixels: int
    ) -> None:
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
        owned = [
            (number, caption) for number, raw in zip(numbers, raws, strict=True) for caption in raw.captions
        ]
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
