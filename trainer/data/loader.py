"""Batches for a rank: loader processes read, decode, crop and tokenise samples.

Rank and world are arguments only; this module names neither torch.distributed nor Horovod and imports nothing
of the launcher. A batch depends on seed, epoch and position alone; the number of loader processes changes
only the speed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.batch_plan import BatchPlan, steps_per_epoch
from trainer.config.losses import PositivesName
from trainer.data.arena import Arena
from trainer.data.blocks import read_sample
from trainer.data.captions import Choice, random_caption
from trainer.data.groups import SHARED, group_numbers
from trainer.data.lanes import Lanes
from trainer.data.loading import loaded
from trainer.data.order import epoch_samples, position_seed
from trainer.data.processes import empty_to_send, received, to_send
from trainer.data.read_ahead import AHEAD_BYTES
from trainer.data.reading import NOTHING, TALLY, Reading
from trainer.data.sample import BadSample, RawSample, Source
from trainer.data.sample_requests import SampleRequest, TrainRequests
from trainer.data.tokens import Masks, Tokenizer
from trainer.data.views import view_seed
from trainer.errors import InputError

Pixels = Callable[[RawSample, int], Tensor]
"""Function from a sample and a seed to uint8 [channels, height, width], or rows of patches.

It gives the same pixels for the same seed, is picklable and raises BadSample.
"""


@runtime_checkable
class WritesInto(Protocol):
    """Protocol of a `Pixels` that can also write its result straight into a batch."""

    def into(self, raw: RawSample, seed: int, out: Tensor) -> None:
        """Writes what the call would return into `out`."""


@runtime_checkable
class DrawsForBatches(Protocol):
    """Protocol of what makes pixels otherwise for each global batch."""

    @property
    def most_bytes(self) -> int:
        """Most bytes of one sample."""

    def of_batch(self, seed: int) -> Pixels:
        """Returns the function for the samples of the global batch with this seed."""


MOST_SUBSTITUTES = 50


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank, in the order of the epoch."""

    images: Tensor
    """Pixels, uint8 [samples, channels, height, width], or rows, as the `pixels` function gives them."""
    tokens: Tensor
    """Token ids, int64 [samples, context length]."""
    epoch: int
    batch_in_epoch: int
    """Number of the global batch within its epoch."""
    micro_batch: int
    """Number within the rank's share of that global batch."""
    positions: Tensor
    """Positions in the order of the epoch, int64 [samples]."""
    captions: list[str]
    keys: list[str]
    bad: tuple[BadSample, ...] = ()
    """Samples that were skipped; others took their places."""
    targets: Tensor | None = None
    """Features that teachers have stored of each picture and caption, [samples, 2, D]; None without any."""
    groups: Tensor | None = None
    """Number of each sample's group, int64 [samples]; None if pairs alone are positives."""
    alone: tuple[str, ...] = ()
    """Keys of the samples that have no group."""
    reading: Reading = NOTHING
    """Cost of reading in its loader process since the batch before."""

    def pin_memory(self) -> "Batch":
        """Returns the batch in page-locked memory, so that copies to the GPU need no waiting.

        torch's loader calls it.
        """
        sent = {name: getattr(self, name) for name in ("images", "tokens", "targets", "groups")}
        return replace(self, **{name: each.pin_memory() for name, each in sent.items() if each is not None})

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[object, ...]]:
        # What is small travels inside the message: opening shared memory takes longer than a copy.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        small = {name: fields[name].numpy() for name in _SMALL if fields[name] is not None}
        return _received, ({**fields, **small, "images": to_send(self.images)},)


_SMALL = ("tokens", "positions", "targets", "groups")


def _received(values: dict[str, Any]) -> Batch:
    """Returns the batch that another process has sent."""
    tensors = {name: torch.from_numpy(values[name]) for name in _SMALL if values[name] is not None}
    return Batch(**{**values, **tensors, "images": received(values["images"])})


def batches_per_epoch(samples: int, plan: BatchPlan) -> int:
    """Returns the number of global batches in one epoch.

    Samples that do not fill one are left to another epoch. Raises InputError if not one batch is full.
    """
    if samples < plan.global_batch_size:
        raise InputError(
            f"optim.global_batch_size = {plan.global_batch_size} is more than the {samples} usable samples "
            f"of data.train: use {samples} or less, or more data"
        )
    return steps_per_epoch(samples, plan.global_batch_size)


def train_batches(
    source: Source,
    *,
    plan: BatchPlan,
    rank: int,
    seed: int,
    order: Lanes,
    pixels: Pixels | DrawsForBatches,
    tokenizer: Tokenizer,
    workers: int,
    weights: Sequence[float] | None = None,
    skip_bad: bool = False,
    caption_choice: Choice = random_caption,
    views: int = 0,
    positives: PositivesName = "pairs",
    epochs: int | None = None,
    start_epoch: int = 0,
    start_batch: int = 0,
    most_batches: int | None = None,
    pin_memory: bool = False,
    ahead_bytes: int = AHEAD_BYTES,
) -> Iterator[Batch]:
    """Yields the rank's micro-batches, `plan.accumulation` for each global batch.

    It starts at `start_batch` of `start_epoch`. It ends after epoch `epochs` - 1, or after `most_batches`
    global batches, behind which nothing is read; with both None it never ends. Over all ranks, no sample
    comes more often than its shard's weight says. `skip_bad` replaces bad samples, and `caption_choice` takes
    one of a sample's captions. With `views`, teachers have seen so many pictures of each sample, of
    which one is drawn. `positives` says which samples are a group. `ahead_bytes` of blocks are read ahead.
    Raises InputError for samples that cannot be read or decoded.
    """
    sizes = source.shard_sizes()
    batches = batches_per_epoch(epoch_samples(sizes, weights), plan)
    if not 0 <= start_batch < batches:
        raise ValueError(f"start_batch {start_batch} of {batches} batches")
    requests = TrainRequests(
        sizes, weights, plan, rank, seed, order, batches, epochs, start_epoch, start_batch, most_batches
    )

    def dataset(arena: Arena | None) -> TrainBatches:
        return TrainBatches(
            source, seed, pixels, tokenizer, skip_bad, caption_choice, arena, views, positives
        )

    return loaded(source, requests, dataset, workers, pin_memory=pin_memory, ahead_bytes=ahead_bytes)


class TrainBatches(Dataset[Batch | InputError]):
    """Turns requests into batches, inside a loader process."""

    def __init__(
        self,
        source: Source,
        seed: int,
        pixels: Pixels | DrawsForBatches,
        tokenizer: Tokenizer,
        skip_bad: bool,
        caption_choice: Choice,
        arena: Arena | None = None,
        views: int = 0,
        positives: PositivesName = "pairs",
    ) -> None:
        self._source, self._arena, self._views = source, arena, views
        self._positives = positives
        self._seed = seed
        self._pixels = pixels
        self._tokenizer = tokenizer
        self._skip_bad = skip_bad
        self._caption_choice = caption_choice

    def __getitem__(self, request: SampleRequest) -> Batch | InputError:
        if request.problem is not None:
            return request.problem
        try:
            return self._batch(request)
        except InputError as error:
            return error

    def _batch(self, request: SampleRequest) -> Batch:
        images, (pixels, most_bytes) = torch.empty(0), self._pixels_of(request)
        writes_into = isinstance(pixels, WritesInto)
        captions: list[str] = []
        keys: list[str] = []
        targets: list[NDArray[np.floating[Any]]] = []
        marks: list[bytes | None] = []
        bad: list[BadSample] = []
        for place, (position, sample) in enumerate(
            zip(request.positions.tolist(), request.samples.tolist(), strict=True)
        ):
            out = images[place] if place and writes_into else None
            at = request.places[place] if request.places else None
            crop = pixels if out is None else partial(_written, cast(WritesInto, pixels), out)
            raw, image = self._usable(sample, request.epoch, position, bad, crop, at)
            if not place:
                count = len(request.samples)
                images = empty_to_send(count, *image.shape, room=count * most_bytes)
            if image is not out:
                images[place] = image
            captions.append(
                self._caption_choice(raw, position_seed(self._seed, request.epoch, position, "caption"))
            )
            keys.append(raw.key)
            marks.append(SHARED[self._positives].mark(raw))
            if raw.target is not None:
                text = len(raw.target) - len(raw.captions) + raw.captions.index(captions[-1])
                targets.append(raw.target[[self._view(request.epoch, position), text]])
        tokens = self._tokens(captions, request)
        groups = group_numbers(self._positives, marks, tokens.numpy(), request.positions)
        alone = () if groups is None else (key for key, mark in zip(keys, marks, strict=True) if mark is None)
        return Batch(
            images,
            tokens,
            *request[:3],
            torch.from_numpy(request.positions),
            captions,
            keys,
            tuple(bad),
            torch.from_numpy(np.stack(targets)) if targets else None,
            groups if groups is None else torch.from_numpy(groups),
            tuple(alone),
            TALLY.pop(),
        )

    def _tokens(self, captions: list[str], request: SampleRequest) -> Tensor:
        if not isinstance(self._tokenizer, Masks):
            return self._tokenizer(captions)
        seeds = [
            position_seed(self._seed, request.epoch, position, "text")
            for position in request.positions.tolist()
        ]
        return self._tokenizer.masked(captions, seeds)

    def _usable(
        self,
        sample: int,
        epoch: int,
        position: int,
        bad: list[BadSample],
        crop: Pixels,
        at: Any,
    ) -> tuple[RawSample, Tensor]:
        """Returns the sample and its pixels by `crop`, replacing a bad sample.

        It is read at its place if that is known. The replacement depends on the position alone. Skipped
        samples are appended to `bad`.
        """
        for attempt in range(MOST_SUBSTITUTES):
            try:
                raw = read_sample(self._source, sample, at, self._arena)
                return raw, crop(raw, self._picture_seed(raw, epoch, position))
            except BadSample as error:
                if not self._skip_bad:
                    raise
                bad.append(error)
            sample = position_seed(self._seed, epoch, position, f"substitute {attempt}") % len(self._source)
            at = None
        raise InputError(f"{MOST_SUBSTITUTES} samples in a row cannot be used; the last one: {bad[-1]}")

    def _view(self, epoch: int, position: int) -> int:
        """Returns the number of the view at a position; 0 without views."""
        return self._views and position_seed(self._seed, epoch, position, "view") % self._views

    def _picture_seed(self, raw: RawSample, epoch: int, position: int) -> int:
        if self._views:
            return view_seed(self._seed, raw, self._view(epoch, position))
        return position_seed(self._seed, epoch, position, "augmentation")

    def _pixels_of(self, request: SampleRequest) -> tuple[Pixels, int]:
        """Returns the function for a request's samples, and most bytes of one; 0: all have as many."""
        if not isinstance(self._pixels, DrawsForBatches):
            return self._pixels, 0
        seed = position_seed(self._seed, request.epoch, request.batch_in_epoch, "pixels of a batch")
        return self._pixels.of_batch(seed), self._pixels.most_bytes


def _written(pixels: WritesInto, out: Tensor, raw: RawSample, seed: int) -> Tensor:
    """Writes the pixels of a sample into `out` and returns it."""
    pixels.into(raw, seed, out)
    return out
