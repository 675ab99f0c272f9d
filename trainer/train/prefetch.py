"""Brings the loader's bytes to the device as micro-batches, which the step normalises one at a time.

On a GPU the next step's micro-batches are copied while this step computes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from trainer.comm.host_memory import to_device
from trainer.config.formats import FORMATS
from trainer.data.bad_samples import Skipped
from trainer.data.caption_lengths import CaptionLengths, CaptionMonitor, counter_of
from trainer.data.captions import choice_by
from trainer.data.changed import Unchanged
from trainer.data.loader import Batch, train_batches
from trainer.data.pixels import normalised
from trainer.data.reading import TALLY
from trainer.data.streams import loader_processes
from trainer.data.tokens import with_mask
from trainer.model.caption_length import CaptionLength
from trainer.train.setup import TrainSetup
from trainer.train.step import MicroBatch

_WHOLE_STEPS = 2
"""First steps of a start whose captions are not cut on a GPU: its allocator then meets the largest first.

Memory for shorter captions fits in that for longer ones, but not the other way round.
"""
Sent = tuple[Tensor, Tensor, Sequence[str]]
"""Images and tokens on the device, and the samples' keys."""


def global_batches(setup: TrainSetup, skipped: Skipped) -> Iterator[list[MicroBatch]]:
    """Yields this rank's micro-batches of each global batch that is left, on the device.

    `skipped` counts the bad samples among them. Loader processes start with the first batch.
    """
    dtype = torch.float64 if setup.job.model.precision == "fp64" else torch.float32
    clip = setup.clip
    # Shapes change the order of sums, so a run that repeats its bits cannot begin otherwise than it goes on.
    whole_steps = 0 if setup.job.comm.deterministic else _WHOLE_STEPS
    prefetcher = Prefetcher(
        setup.comm.device,
        dtype,
        clip.mean,
        clip.std,
        clip.kernels.caption_length,
        whole_steps,
        clip.images.normalised,
    )
    return prefetcher.steps(_loaded(setup, skipped), setup.plan.accumulation)


def _loaded(setup: TrainSetup, skipped: Skipped) -> Iterator[Batch]:
    """Yields this rank's micro-batches as the loader gives them, and counts skipped samples."""
    job, steps_done = setup.job, setup.start.steps_done
    epoch, batch = divmod(steps_done, setup.schedule.epoch_steps)
    stream = train_batches(
        setup.source,
        plan=setup.plan,
        rank=setup.comm.world.rank,
        seed=job.seed,
        order=setup.order,
        pixels=setup.clip.images.crop,
        tokenizer=with_mask(setup.clip.tokenizer, job.data.text_mask),
        workers=loader_processes(setup.source, job.data.workers),
        weights=setup.weights,
        skip_bad=job.data.on_bad_sample == "skip",
        caption_choice=choice_by(job.data),
        start_epoch=epoch,
        start_batch=batch,
        most_batches=setup.schedule.steps - steps_done,
        pin_memory=setup.comm.device.type == "cuda",
        ahead_bytes=job.data.read_ahead_mb * 2**20,
    )
    micro_batches = (setup.schedule.steps - steps_done) * setup.plan.accumulation
    captions = _caption_monitor(setup, micro_batches * setup.plan.micro_batch_size)
    unchanged = Unchanged(setup.source)
    for micro_batch in islice(stream, micro_batches):
        unchanged.check(micro_batch.bad)
        skipped.record(len(micro_batch.keys), micro_batch.bad)
        captions.record(micro_batch.captions)
        TALLY.add(micro_batch.reading)
        yield micro_batch


def _caption_monitor(setup: TrainSetup, captions: int) -> CaptionMonitor:
    """Returns what says on rank 0 how long the captions of real data are, of which this rank gets so many."""
    tokenizer, data = setup.clip.tokenizer, setup.job.data
    most, counter = getattr(tokenizer, "context_length", None), counter_of(tokenizer)
    silent = setup.comm.world.rank or not FORMATS[data.kind].unit
    lengths = None if silent or counter is None or most is None else CaptionLengths(int(most), counter)
    return CaptionMonitor(lengths, captions, data)


class Prefetcher:
    """Moves images to the device as uint8, with the function that normalises them there.

    That function, `normalise`, gives `dtype`, minus the mean and divided by the standard deviation of each
    channel. Tokens are cut to the length that `caption_length` finds; without it they stay as they are. On a
    GPU they also stay so in the first `whole_steps` steps.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        mean: Sequence[float],
        std: Sequence[float],
        caption_length: CaptionLength | None = None,
        whole_steps: int = 0,
        normalise: Callable[[Tensor, Tensor, Tensor], Tensor] = normalised,
    ) -> None:
        self._device, self._caption_length, self._whole_steps = device, caption_length, whole_steps
        self._normalise = normalise
        self._mean, self._std = (
            to_device(torch.tensor(channels, dtype=dtype), device) for channels in (mean, std)
        )

    def steps(self, batches: Iterator[Batch], accumulation: int) -> Iterator[list[MicroBatch]]:
        """Yields the micro-batches of each step.

        On a GPU one step is fetched ahead, on a CUDA stream of its own.
        """
        groups = iter(lambda: list(islice(batches, accumulation)), [])
        if self._device.type != "cuda":
            return (
                [
                    self._micro(batch.images, batch.tokens[:, : self._length(batch)], batch.keys)
                    for batch in group
                ]
                for group in groups
            )
        return self._ahead(groups)

    def _ahead(self, groups: Iterator[list[Batch]]) -> Iterator[list[MicroBatch]]:
        stream = torch.cuda.Stream(self._device)
        waiting, arrived = self._sent(groups, stream)
        while waiting:
            following, arrives = self._sent(groups, stream)
            torch.cuda.current_stream(self._device).wait_event(arrived)
            yield [self._received(*batch) for batch in waiting]
            waiting, arrived = following, arrives

    def _sent(
        self, groups: Iterator[list[Batch]], stream: torch.cuda.Stream
    ) -> tuple[list[Sent], torch.cuda.Event]:
        """Starts to copy the next step's bytes; returns them and the event that marks their arrival.

        With pinned memory the copies run beside the computation.
        """
        group = next(groups, [])
        with torch.cuda.stream(stream):
            sent: list[Sent] = [
                (
                    batch.images.to(self._device, non_blocking=True),
                    # Whole, and cut there: rows that do not follow one another would make the host wait.
                    batch.tokens.to(self._device, non_blocking=True)[:, : self._length(batch)],
                    batch.keys,
                )
                for batch in group
            ]
        self._whole_steps -= 1
        return sent, stream.record_event()

    def _length(self, batch: Batch) -> int | None:
        if self._caption_length is None or (self._device.type == "cuda" and self._whole_steps > 0):
            return None
        return self._caption_length(batch.tokens)

    def _received(self, images: Tensor, tokens: Tensor, keys: Sequence[str]) -> MicroBatch:
        for tensor in (images, tokens):
            # Another stream allocated their memory and would otherwise reuse it too early.
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return self._micro(images, tokens, keys)

    def _micro(self, images: Tensor, tokens: Tensor, keys: Sequence[str]) -> MicroBatch:
        return MicroBatch(images, tokens, keys, self._normalised)

    def _normalised(self, images: Tensor) -> Tensor:
        return self._normalise(images, self._mean, self._std)
