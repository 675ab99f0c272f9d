"""Blocks of labelled images for evaluation, the same for any number of ranks.

Loader processes read, decode and transform the images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    return loaded_blocks(samples, EvalBlocks, rank, world_size, workers, pin_memory=pin_memory)


class EvalBlocks(Dataset[EvalBlock | InputError]):
    """Reads the blocks of requests, inside a loader process."""

    def __init__(self, samples: "UsableSamples") -> None:
        self._samples = samples

    def __getitem__(self, request: SampleRequest) -> EvalBlock | InputError:
        try:
            return self._read(request)
        except InputError as error:
            return error

    def _read(self, request: SampleRequest) -> EvalBlock:
        usable = self._samples.of_block(request)
        labels = torch.full((self._samples.block,), -1)
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


def loaded_blocks(
    samples: UsableSamples,
    dataset_of: Callable[[UsableSamples], Dataset[Loaded | InputError]],
    rank: int,
    world_size: int,
    workers: int,
    *,
    pin_memory: bool = False,
) -> Iterator[Loaded]:
    """Yields what a data set makes of this rank's blocks of samples, by at most `workers` processes."""
    source = samples.source
    requests = EvalRequests(source.shard_sizes(), rank=rank, world_size=world_size, block=samples.block)
    return loaded(
        source,
        requests,
        lambda arena: dataset_of(replace(samples, arena=arena)),
        min(workers, len(requests)),
        pin_memory=pin_memory,
    )
