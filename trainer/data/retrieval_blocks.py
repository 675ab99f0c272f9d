"""Blocks of images with all of their captions, for retrieval.

Loader processes read, decode and tokenise them. See `eval_blocks.py`.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.eval_blocks import Transform, UsableSamples, loaded_blocks
from trainer.data.pictures import AS_SHOWN, Decoding
from trainer.data.sample import BadSample, Source
from trainer.data.sample_requests import SampleRequest
from trainer.data.tokens import Tokenizer
from trainer.data.views import Views
from trainer.errors import InputError


class RetrievalBlock(NamedTuple):
    """A block of `block` consecutive images and all of their captions, image by image.

    Samples that cannot be used are left out; the block is filled up with zeros.
    """

    images: Tensor
    """Images as `Transform` returns them, float32 [block, ...], or views [block, views, 3, height, width];
    empty if no sample can be used."""
    numbers: tuple[int, ...]
    """Numbers of the images that can be used, in the whole set."""
    keys: tuple[str, ...]
    """Their keys."""
    bad: tuple[BadSample, ...]
    """Samples that cannot."""
    tokens: Tensor
    """Token ids, int64 [captions, context length]."""
    image_of_caption: Tensor
    """Number of each caption's image in the whole set, int64 [captions]."""
    digests: Tensor
    """Digests of the captions, int64 [captions]; equal captions have equal digests."""

    @property
    def valid(self) -> int:
        """Number of images that can be used."""
        return len(self.numbers)


def retrieval_blocks(
    source: Source,
    *,
    rank: int,
    world_size: int,
    block: int,
    transform: Transform,
    tokenizer: Tokenizer,
    workers: int,
    decoding: Decoding = AS_SHOWN,
    skip_bad: bool = False,
    pictures: Views | None = None,
) -> Iterator[RetrievalBlock]:
    """Yields this rank's blocks: every `world_size`-th one.

    Any number of images will do; a rank for which no block is left yields none. `skip_bad` is as for
    `eval_blocks`. `pictures` makes several views of an image, in place of the transform.
    """
    samples = UsableSamples(source, block, transform, decoding, skip_bad, pictures=pictures)
    return loaded_blocks(samples, lambda each: RetrievalBlocks(each, tokenizer), rank, world_size, workers)


class RetrievalBlocks(Dataset[RetrievalBlock | InputError]):
    """Reads the blocks of requests, inside a loader process."""

    def __init__(self, samples: UsableSamples, tokenizer: Tokenizer) -> None:
        self._samples, self._tokenizer = samples, tokenizer

    def __getitem__(self, request: SampleRequest) -> RetrievalBlock | InputError:
        try:
            return self._read(request)
        except InputError as error:
            return error

    def _read(self, request: SampleRequest) -> RetrievalBlock:
        usable = self._samples.of_block(request)
        owned = [
            (number, caption)
            for number, raw in zip(usable.numbers, usable.raws, strict=True)
            for caption in raw.captions
        ]
        captions = [caption for _, caption in owned]
        return RetrievalBlock(
            usable.images,
            usable.numbers,
            tuple(raw.key for raw in usable.raws),
            usable.bad,
            self._tokenizer(captions) if captions else torch.empty(0, 0),
            torch.tensor([number for number, _ in owned]),
            torch.tensor([_digest(caption) for caption in captions]),
        )


def _digest(caption: str) -> int:
    return int.from_bytes(blake2b(caption.encode(), digest_size=8).digest(), signed=True)
