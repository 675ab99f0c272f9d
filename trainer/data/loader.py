"""Batches for a rank: loader processes read, decode, crop and tokenise samples.

Rank and world are arguments only; this module names neither torch.distributed nor Horovod and imports nothing
of the launcher. A batch depends on seed, epoch and position alone; the number of loader processes changes
only the speed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainer.config.batch_plan import BatchPlan, steps_per_epoch
from trainer.data.captions import Choice, random_caption
from trainer.data.order import EpochOrder, Samples, epoch_samples, position_seed
from trainer.data.processes import empty_to_send, load, received, to_send
from trainer.data.sample import BadSample, RawSample, Source
from trainer.data.tokens import Masks, Tokenizer
from trainer.errors import InputError

Pixels = Callable[[RawSample, int], Tensor]
"""Function from a sample and a seed to uint8 [channels, height, width].

It gives the same pixels for the same seed, is picklable and raises BadSample.
"""


@runtime_checkable
class WritesInto(Protocol):
    """Protocol of a `Pixels` that can also write its result straight into a batch."""

    def into(self, raw: RawSample, seed: int, out: Tensor) -> None:
        """Writes what the call would return into `out`, uint8 [channels, height, width]."""


MOST_SUBSTITUTES = 50


@dataclass(frozen=True)
class Batch:
    """One micro-batch of a rank, in the order of the epoch."""

    images: Tensor
    """Pixels, uint8 [samples, channels, height, width], as the `pixels` function gives them."""
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

    def pin_memory(self) -> "Batch":
        """Returns the batch in page-locked memory, so that copies to the GPU need no waiting.

        torch's loader calls it.
        """
        return replace(self, images=self.images.pin_memory(), tokens=self.tokens.pin_memory())

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[object, ...]]:
        # Tokens and positions travel inside the message: opening shared memory takes longer than a copy.
        small = {"tokens": self.tokens.numpy(), "positions": self.positions.numpy()}
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _received, ({**fields, **small, "images": to_send(self.images)},)


def _received(values: dict[str, Any]) -> Batch:
    """Returns the batch that another process has sent."""
    tensors = {name: torch.from_numpy(values[name]) for name in ("tokens", "positions")}
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
    window: int,
    pixels: Pixels,
    tokenizer: Tokenizer,
    workers: int,
    weights: Sequence[float] | None = None,
    skip_bad: bool = False,
    caption_choice: Choice = random_caption,
    epochs: int | None = None,
    start_epoch: int = 0,
    start_batch: int = 0,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Yields the rank's micro-batches, `plan.accumulation` for each global batch.

    It starts at `start_batch` of `start_epoch`. It ends after epoch `epochs` - 1; with `epochs` None it never
    ends. Over all ranks, no sample comes more often than its shard's weight says. `skip_bad` replaces bad
    samples, and `caption_choice` takes one of a sample's captions. Raises InputError for samples that
    cannot be read or decoded.
    """
    sizes = source.shard_sizes()
    batches = batches_per_epoch(epoch_samples(sizes, weights), plan)
    if not 0 <= start_batch < batches:
        raise ValueError(f"start_batch {start_batch} of {batches} batches")
    requests = TrainRequests(
        sizes, weights, plan, rank, seed, window, batches, epochs, start_epoch, start_batch
    )
    return load(
        TrainBatches(source, seed, pixels, tokenizer, skip_bad, caption_choice), requests, workers, pin_memory
    )


class TrainRequest(NamedTuple):
    """Samples of one micro-batch; `positions` and `samples` are int64 [samples]."""

    epoch: int
    batch_in_epoch: int
    micro_batch: int
    positions: Samples
    samples: Samples


@dataclass(frozen=True)
class TrainRequests:
    """The requests of one rank, in order."""

    shard_sizes: Sequence[int]
    weights: Sequence[float] | None
    plan: BatchPlan
    rank: int
    seed: int
    window: int
    batches: int
    epochs: int | None
    start_epoch: int
    start_batch: int

    def __iter__(self) -> Iterator[TrainRequest]:
        epoch, batch = self.start_epoch, self.start_batch
        while self.epochs is None or epoch < self.epochs:
            order = EpochOrder(
                self.shard_sizes, seed=self.seed, epoch=epoch, window=self.window, weights=self.weights
            )
            for number in range(batch, self.batches):
                yield from self._of_batch(order, epoch, number)
            epoch, batch = epoch + 1, 0

    def _of_batch(self, order: EpochOrder, epoch: int, batch: int) -> Iterator[TrainRequest]:
        first = batch * self.plan.global_batch_size + self.rank * self.plan.batch_size_per_rank
        for micro_batch in range(self.plan.accumulation):
            begin = first + micro_batch * self.plan.micro_batch_size
            end = begin + self.plan.micro_batch_size
            yield TrainRequest(epoch, batch, micro_batch, np.arange(begin, end), order.samples(begin, end))


class TrainBatches(Dataset[Batch | InputError]):
    """Turns requests into batches, inside a loader process."""

    def __init__(
        self,
        source: Source,
        seed: int,
        pixels: Pixels,
        tokenizer: Tokenizer,
        skip_bad: bool,
        caption_choice: Choice,
    ) -> None:
        self._source = source
        self._seed = seed
        self._pixels = pixels
        self._writes_into = isinstance(pixels, WritesInto)
        self._tokenizer = tokenizer
        self._skip_bad = skip_bad
        self._caption_choice = caption_choice

    def __getitem__(self, request: TrainRequest) -> Batch | InputError:
        try:
            return self._batch(request)
        except InputError as error:
            return error

    def _batch(self, request: TrainRequest) -> Batch:
        images = torch.empty(0)
        captions: list[str] = []
        keys: list[str] = []
        bad: list[BadSample] = []
        for place, (position, sample) in enumerate(
            zip(request.positions.tolist(), request.samples.tolist(), strict=True)
        ):
            out = images[place] if place else None
            raw, image = self._usable(sample, request.epoch, position, bad, out)
            if not place:
                images = empty_to_send(len(request.samples), *image.shape)
            if image is not out:
                images[place] = image
            captions.append(
                self._caption_choice(raw, position_seed(self._seed, request.epoch, position, "caption"))
            )
            keys.append(raw.key)
        return Batch(
            images,
            self._tokens(captions, request),
            *request[:3],
            torch.from_numpy(request.positions),
            captions,
            keys,
            tuple(bad),
        )

    def _tokens(self, captions: list[str], request: TrainRequest) -> Tensor:
        if not isinstance(self._tokenizer, Masks):
            return self._tokenizer(captions)
        seeds = [
            position_seed(self._seed, request.epoch, position, "text")
            for position in request.positions.tolist()
        ]
        return self._tokenizer.masked(captions, seeds)

    def _usable(
        self, sample: int, epoch: int, position: int, bad: list[BadSample], out: Tensor | None
    ) -> tuple[RawSample, Tensor]:
        """Returns the sample and its pixels, replacing a bad sample; the pixels are `out` if written there.

        The replacement depends on the position alone. Skipped samples are appended to `bad`.
        """
        for attempt in range(MOST_SUBSTITUTES):
            try:
                raw = self._source.read(sample)
                return raw, self._pixels_of(
                    raw, position_seed(self._seed, epoch, position, "augmentation"), out
                )
            except BadSample as error:
                if not self._skip_bad:
                    raise
                bad.append(error)
            sample = position_seed(self._seed, epoch, position, f"substitute {attempt}") % len(self._source)
        raise InputError(f"{MOST_SUBSTITUTES} samples in a row cannot be used; the last one: {bad[-1]}")

    def _pixels_of(self, raw: RawSample, seed: int, out: Tensor | None) -> Tensor:
        if out is None or not self._writes_into:
            return self._pixels(raw, seed)
        cast(WritesInto, self._pixels).into(raw, seed, out)
        return out
