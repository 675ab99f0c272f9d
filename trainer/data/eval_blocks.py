"""Blocks of images for evaluation, with labels or all captions, the same for any number of ranks.

Loader processes read, decode and transform the images, and tokenise the captions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.arena import Arena
from trainer.data.blocks import read_sample
from trainer.data.loading import Loaded, loaded
from trainer.data.pictures import AS_SHOWN, Decoding, decode
from trainer.data.sample import BadSample, RawSample, Source
from trainer.data.sample_requests import EvalRequests, SampleRequest
from trainer.data.tokens import Tokenizer
from trainer.data.views import Views
from trainer.errors import InputError

Transform = Callable[[Image.Image], Tensor]
"""Function from a picture to float32 [3, height, width], or rows of patches; picklable.

It is open_clip's own, so that scores equal open_clip's.
"""


class EvalBlock(NamedTuple):
    """A block of `block` consecutive images, the same for any number of ranks.

    It holds those that can be used, then zeros with label -1.
    """

    images: Tensor
    """Images as `Transform` returns them, float32 [block, ...]; empty if no sample can be used."""
    labels: Tensor
    """Class numbers, int64 [block]."""
    numbers: tuple[int, ...]
    """Numbers of the samples that can be used, in the source."""
    bad: tuple[BadSample, ...]
    """Samples that cannot."""

    @property
    def valid(self) -> int:
        """Number of samples that can be used."""
        return len(self.numbers)


def eval_blocks(
    source: Source,
    *,
    rank: int,
    world_size: int,
    block: int,
    transform: Transform,
    workers: int,
    decoding: Decoding = AS_SHOWN,
    skip_bad: bool = False,
    pin_memory: bool = False,
) -> Iterator[EvalBlock]:
    """Yields this rank's blocks of `block` samples: every `world_size`-th one.

    Any number of samples will do; a rank for which no block is left yields none. `skip_bad` leaves bad
    samples out; otherwise the first raises BadSample.
    """
    samples = UsableSamples(source, block, transform, decoding, skip_bad)
    return loaded_blocks(samples, partial(_labelled, block), rank, world_size, workers, pin_memory=pin_memory)


def _labelled(block: int, usable: "Usable") -> EvalBlock:
    labels = torch.full((block,), -1)
    labels[: len(usable.raws)] = torch.tensor([raw.label for raw in usable.raws])
    return EvalBlock(usable.images, labels, usable.numbers, usable.bad)


class Usable(NamedTuple):
    """The samples of a block that can be used, in order, and those that cannot."""

    numbers: tuple[int, ...]
    raws: Sequence[RawSample]
    images: Tensor
    """Images as `Transform` returns them, then zeros: float32 [block, ...]; empty if no sample can be used.

    All blocks pass the model in the same shape.
    """
    bad: tuple[BadSample, ...]


@dataclass(frozen=True)
class UsableSamples:
    """Reads and decodes the samples of a block, inside a loader process."""

    source: Source
    block: int
    transform: Transform
    decoding: Decoding
    skip_bad: bool
    arena: Arena | None = None
    """Memory into which blocks have been read ahead; None: each sample is read when its turn comes."""
    pictures: Callable[[RawSample], Tensor] | None = None
    """Function from a sample to several pictures, in place of the transform."""

    def of_block(self, request: SampleRequest) -> Usable:
        """Returns the samples of a block; raises BadSample unless `skip_bad`, and the request's problem."""
        if request.problem is not None:
            raise request.problem
        found: list[tuple[int, RawSample, Tensor]] = []
        bad: list[BadSample] = []
        for number, place in zip_longest(request.samples.tolist(), request.places):
            try:
                raw = read_sample(self.source, number, place, self.arena)
                made = self.pictures(raw) if self.pictures else self.transform(decode(raw, self.decoding))
                found.append((number, raw, made))
            except BadSample as error:
                if not self.skip_bad:
                    raise
                bad.append(error)
        numbers, raws, pictures = zip(*found, strict=True) if found else ((), (), ())
        return Usable(numbers, raws, self._filled(pictures), tuple(bad))

    def _filled(self, pictures: Sequence[Tensor]) -> Tensor:
        if not pictures:
            return torch.empty(0)
        images = pictures[0].new_zeros(self.block, *pictures[0].shape)
        torch.stack(list(pictures), out=images[: len(pictures)])
        return images


class _Blocks(Dataset[Loaded | InputError]):
    """Reads the blocks of requests, inside a loader process."""

    def __init__(self, samples: UsableSamples, block_of: Callable[[Usable], Loaded]) -> None:
        self._samples, self._block_of = samples, block_of

    def __getitem__(self, request: SampleRequest) -> Loaded | InputError:
        try:
            return self._block_of(self._samples.of_block(request))
        except InputError as error:
            return error


def loaded_blocks(
    samples: UsableSamples,
    block_of: Callable[[Usable], Loaded],
    rank: int,
    world_size: int,
    workers: int,
    *,
    pin_memory: bool = False,
) -> Iterator[Loaded]:
    """Yields what `block_of`, picklable, makes of this rank's blocks, by at most `workers` processes."""
    source = samples.source
    requests = EvalRequests(source.shard_sizes(), rank=rank, world_size=world_size, block=samples.block)
    return loaded(
        source,
        requests,
        lambda arena: _Blocks(replace(samples, arena=arena), block_of),
        min(workers, len(requests)),
        pin_memory=pin_memory,
    )


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
    return loaded_blocks(samples, partial(_captioned, tokenizer), rank, world_size, workers)


def _captioned(tokenizer: Tokenizer, usable: Usable) -> RetrievalBlock:
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
        tokenizer(captions) if captions else torch.empty(0, 0),
        torch.tensor([number for number, _ in owned]),
        torch.tensor([_digest(caption) for caption in captions]),
    )


def _digest(caption: str) -> int:
    return int.from_bytes(blake2b(caption.encode(), digest_size=8).digest(), signed=True)
