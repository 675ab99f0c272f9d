"""Blocks of labelled images for evaluation, the same for any number of ranks.

Loader processes read, decode and transform the images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from trainer.data.pictures import MOST_PIXELS, decode
from trainer.data.processes import load
from trainer.data.sample import BadSample, RawSample, Source
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
    most_pixels: int = MOST_PIXELS,
    skip_bad: bool = False,
    pin_memory: bool = False,
) -> Iterator[EvalBlock]:
    """Yields this rank's blocks of `block` samples: every `world_size`-th one.

    Any number of samples will do; a rank for which no block is left yields none. `skip_bad` leaves bad
    samples out; otherwise the first raises BadSample.
    """
    firsts = range(rank * block, len(source), world_size * block)
    blocks = EvalBlocks(UsableSamples(source, block, transform, most_pixels, skip_bad))
    return load(blocks, firsts, min(workers, len(firsts)), pin_memory)


class EvalBlocks(Dataset[EvalBlock | InputError]):
    """Reads the block that begins with a given sample number, inside a loader process."""

    def __init__(self, samples: "UsableSamples") -> None:
        self._samples = samples

    def __getitem__(self, first: int) -> EvalBlock | InputError:
        try:
            return self._read(first)
        except InputError as error:
            return error

    def _read(self, first: int) -> EvalBlock:
        usable = self._samples.of_block(first)
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
    most_pixels: int
    skip_bad: bool

    def of_block(self, first: int) -> Usable:
        """Returns the samples of the block that begins with `first`; raises BadSample unless `skip_bad`."""
        found: list[tuple[int, RawSample, Tensor]] = []
        bad: list[BadSample] = []
        for number in range(first, min(first + self.block, len(self.source))):
            try:
                raw = self.source.read(number)
                found.append((number, raw, self.transform(decode(raw, self.most_pixels))))
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
