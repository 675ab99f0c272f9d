"""Brings the loader's bytes to the device as micro-batches, which the step normalises one at a time.

On a GPU the next step's micro-batches are copied while this step computes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.comm.accelerator import on_accelerator, pins_memory, runtime
from trainer.comm.host_memory import to_device
from trainer.config.batch_plan import passes
from trainer.config.formats import FORMATS
from trainer.data.bad_samples import Skipped
from trainer.data.caption_lengths import CaptionLengths, CaptionMonitor, counter_of
from trainer.data.captions import choice_by
from trainer.data.changed import Unchanged
from trainer.data.loader import Batch, train_batches
from trainer.data.loading import Ahead
from trainer.data.pixels import normalised
from trainer.data.reading import TALLY
from trainer.data.streams import loader_processes
from trainer.data.targets import StoredTeacher
from trainer.data.tokens import with_mask
from trainer.data.views import crop_of_views
from trainer.errors import Preempted
from trainer.model.caption_length import CaptionLength
from trainer.model.packed_captions import Packed, pack
from trainer.model.teacher import Judgement
from trainer.text.wording import many
from trainer.train.setup import TrainSetup
from trainer.train.step import MicroBatch

log = logging.getLogger("clipship")
_WORTH = 0.05
"""Share of the text tower's tokens that has to be spared: samples that change place are copied."""
_TOLD_AFTER = 10
"""Steps after which the log says what was spared."""


class ByLength:
    """Decides the order of the samples of each step, and counts the tokens that it spares.

    The samples of a rank in a step, and so the step's gradient, stay what they were; only which of them pass
    together follows from their captions. Each micro-batch is then cut behind its own longest caption.
    """

    def __init__(self, rule: CaptionLength, tells: bool) -> None:
        """`tells` says whether this process logs what was spared."""
        self._rule, self._tells = rule, tells
        self._steps = self._loaded = self._left = 0

    def order(self, tokens: Sequence[Tensor]) -> Tensor | None:
        """Returns the places of a step's samples in a better order, int64; None to leave them as they are.

        `tokens` are those of the micro-batches, of equal size, int64 [B, L] on the host.
        """
        if len(tokens) == 1:
            return None
        whole = torch.cat(list(tokens))
        order = self._rule.needed(whole).argsort(stable=True)
        loaded, sorted_ = (
            sum(map(self._rule, parts)) for parts in (tokens, whole[order].split(len(tokens[0])))
        )
        worth = loaded - sorted_ > _WORTH * loaded
        self._count(loaded, sorted_ if worth else loaded)
        return order if worth else None

    def _count(self, loaded: int, left: int) -> None:
        self._steps, self._loaded, self._left = self._steps + 1, self._loaded + loaded, self._left + left
        if self._steps == _TOLD_AFTER and self._tells and self._left < self._loaded:
            log.info(
                "%-12s micro-batches by caption length: %.0f %% fewer tokens in the text tower in %s",
                "captions",
                100 * (1 - self._left / self._loaded),
                many(self._steps, "step"),
            )


_WHOLE_STEPS = 2
"""First steps of a start whose captions are not cut on a GPU: its allocator then meets the largest first.

Memory for shorter captions fits in that for longer ones, but not the other way round.
"""
Sent = tuple[list[Any], Sequence[str], Sequence[int] | None]
"""Images, tokens and, if there are any, stored targets and numbers of groups on the device; the samples'
keys, and their places if they are in another order."""


class Awaited(Ahead[Batch]):
    """A rank's micro-batches; the last one comes in the place of those that are missing.

    The loader processes start when they are iterated.
    """

    def __init__(self, setup: TrainSetup) -> None:
        super().__init__(lambda: _loaded(setup), setup.plan.accumulation, lambda: setup.requests.stop)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the micro-batches. Raises Preempted if the first one is missing."""
        last: Batch | None = None
        for last in super().__iter__():
            yield last
        while self.missing:
            if last is None:
                raise Preempted("asked to stop before storage has given a batch; the run can go on")
            yield last


def global_batches(
    setup: TrainSetup, skipped: Skipped, loaded: Awaited | None = None
) -> Iterator[list[MicroBatch]]:
    """Yields this rank's micro-batches of each global batch that is left, on the device.

    `loaded` are those of its loader, whose processes start with the first batch. `skipped` counts the bad
    samples among them.
    """
    dtype = torch.float64 if setup.job.model.precision == "fp64" else torch.float32
    clip = setup.clip
    # Shapes change the order of sums, so a run that repeats its bits cannot begin otherwise than it goes on.
    whole_steps = 0 if setup.job.comm.deterministic else _WHOLE_STEPS
    rule, normalise = clip.kernels.caption_length, clip.images.normalised
    by_length = None if rule is None else ByLength(rule, tells=setup.comm.world.rank == 0)
    parts = None if clip.images.one_size else partial(passes, setup.job, setup.plan)
    channels, teachers = (clip.mean, clip.std), setup.targets.teachers if setup.targets else ()
    prefetcher = Prefetcher(
        setup.comm.device, dtype, *channels, rule, whole_steps, by_length, normalise, parts, teachers
    )
    accumulation, loaded = setup.plan.accumulation, loaded or Awaited(setup)
    batches = _fetched(_recorded(setup, loaded, skipped), accumulation, skipped)
    return _begun(prefetcher.steps(batches, accumulation, lambda: loaded.ready), skipped)


def _fetched(batches: Iterator[Batch], accumulation: int, skipped: Skipped) -> Iterator[Batch]:
    for number, batch in enumerate(batches, 1):
        if number % accumulation == 0:
            skipped.step_fetched()
        yield batch


def _begun(steps: Iterator[list[MicroBatch]], skipped: Skipped) -> Iterator[list[MicroBatch]]:
    for step in steps:
        skipped.step_begins()
        yield step


def _loaded(setup: TrainSetup) -> Iterator[Batch]:
    """Returns this rank's micro-batches as the loader gives them."""
    job, steps_done, targets = setup.job, setup.start.steps_done, setup.targets
    views, crop = targets.views if targets else 0, setup.clip.images.crop
    epoch, batch = divmod(setup.schedule.own(steps_done), setup.schedule.epoch_steps)
    return train_batches(
        targets.beside(setup.source) if targets else setup.source,
        plan=setup.plan,
        rank=setup.comm.world.rank,
        seed=job.seed,
        order=setup.order,
        pixels=crop_of_views(crop) if views else crop,
        tokenizer=with_mask(setup.clip.tokenizer, job.data.text_mask),
        workers=loader_processes(setup.source, job.data.workers),
        weights=setup.weights,
        skip_bad=job.data.on_bad_sample == "skip",
        caption_choice=choice_by(job.data),
        views=views,
        positives=job.optim.positives,
        start_epoch=epoch,
        start_batch=batch,
        most_batches=setup.schedule.steps - steps_done,
        pin_memory=pins_memory(setup.comm.device),
        ahead_bytes=job.data.read_ahead_mb * 2**20,
    )


def _recorded(setup: TrainSetup, batches: Iterable[Batch], skipped: Skipped) -> Iterator[Batch]:
    """Yields the micro-batches that are left, and counts skipped samples."""
    micro_batches = (setup.schedule.steps - setup.start.steps_done) * setup.plan.accumulation
    captions = _caption_monitor(setup, micro_batches * setup.plan.micro_batch_size)
    unchanged = Unchanged(setup.source)
    for micro_batch in islice(batches, micro_batches):
        unchanged.check(micro_batch.bad)
        skipped.record(
            len(micro_batch.keys), micro_batch.bad, micro_batch.alone, micro_batch.reading.transparent
        )
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


class _Part(NamedTuple):
    """Samples that pass together, on the host."""

    images: Sequence[Tensor]
    """Those of the loader's micro-batches that they came in."""
    tokens: Tensor
    keys: Sequence[str]
    beside: Sequence[Sequence[Tensor]]
    """Stored targets and numbers of groups, as far as there are any, of the same micro-batches."""


class Prefetcher:
    """Moves images to the device as uint8, with the function that normalises them there.

    That function, `normalise`, gives `dtype`, minus the mean and divided by the standard deviation of each
    channel. Captions are packed or cut as `caption_length` says; without it they stay as they are. On a GPU
    all of their tokens are computed in the first `whole_steps` steps. `by_length` may let other samples of a
    step pass together. `passes` says in how many micro-batches a step passes whose images have so many
    patches: a divisor of those that are loaded. `teachers` have stored the targets, side by side.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        mean: Sequence[float],
        std: Sequence[float],
        caption_length: CaptionLength | None = None,
        whole_steps: int = 0,
        by_length: ByLength | None = None,
        normalise: Callable[[Tensor, Tensor, Tensor], Tensor] = normalised,
        passes: Callable[[int], int] | None = None,
        teachers: Sequence[StoredTeacher] = (),
    ) -> None:
        self._runtime = runtime(device)
        self._device, self._caption_length, self._whole_steps = device, caption_length, whole_steps
        self._by_length, self._normalise, self._passes = by_length, normalise, passes
        self._mean, self._std = (
            to_device(torch.tensor(channels, dtype=dtype), device) for channels in (mean, std)
        )

        def scalar(value: float) -> Tensor:
            return to_device(torch.tensor(value, dtype=dtype), device)

        self._widths = [teacher.width for teacher in teachers]
        self._logits = [
            (scalar(each.logit_scale), None if each.logit_bias is None else scalar(each.logit_bias))
            for each in teachers
        ]

    def steps(
        self, batches: Iterator[Batch], accumulation: int, ready: Callable[[], bool] = lambda: True
    ) -> Iterator[list[MicroBatch]]:
        """Yields the micro-batches of each step.

        On a GPU the next step is sent ahead, on a stream of its own, if its batches are `ready`.
        """
        groups = iter(lambda: list(islice(batches, accumulation)), [])
        if not on_accelerator(self._device):
            return ([self._micro(*batch) for batch in self._cut(group)] for group in groups)
        return self._ahead(groups, ready)

    def _ahead(self, groups: Iterator[list[Batch]], ready: Callable[[], bool]) -> Iterator[list[MicroBatch]]:
        stream = self._runtime.Stream(self._device)
        waiting, arrived = self._sent(groups, stream)
        while waiting:
            following = self._sent(groups, stream) if ready() else None
            self._runtime.current_stream(self._device).wait_event(arrived)
            yield [self._received(*batch) for batch in waiting]
            waiting, arrived = following or self._sent(groups, stream)

    def _sent(self, groups: Iterator[list[Batch]], stream: torch.Stream) -> tuple[list[Sent], torch.Event]:
        """Starts to copy the next step's bytes; returns them and the event that marks their arrival.

        With pinned memory the copies run beside the computation.
        """
        group = next(groups, [])
        with self._runtime.stream(stream):
            sent = self._cut(group)
        self._whole_steps -= 1
        return sent, stream.record_event()

    def _parts(self, batches: list[Batch]) -> list[_Part]:
        """Returns a step's samples as they are to pass."""
        times = 1
        if self._passes is not None and batches:
            times = len(batches) // self._passes(batches[0].images.shape[1] - 1)
        return [_together(batches[at : at + times]) for at in range(0, len(batches), times)]

    def _cut(self, batches: list[Batch]) -> list[Sent]:
        """Returns a step's micro-batches on the device, with captions no longer than those of each need."""
        group = self._parts(batches)
        rule, on_gpu = self._caption_length, on_accelerator(self._device)
        whole = on_gpu and self._whole_steps > 0
        if rule is not None and rule.packs and on_gpu:
            return [
                (self._brought(batch, self._packed(batch.tokens, rule, whole)), batch.keys, None)
                for batch in group
            ]
        if rule is None or not group or whole:
            return [(self._brought(batch), batch.keys, None) for batch in group]
        order = None if self._by_length is None else self._by_length.order([batch.tokens for batch in group])
        if order is None:
            # Whole, and cut there: rows that do not follow one another would make the host wait.
            return [
                ([images, tokens[:, : rule(batch.tokens)], *beside], batch.keys, None)
                for batch in group
                for images, tokens, *beside in [self._brought(batch)]
            ]
        return self._ordered(group, order, rule)

    def _ordered(self, group: list[_Part], order: Tensor, rule: CaptionLength) -> list[Sent]:
        size = len(group[0].keys)
        new_places = to_device(order.argsort(), self._device).split(size)
        moved = _moved(map(self._brought, group), new_places)
        lengths = map(rule, torch.cat([batch.tokens for batch in group])[order].split(size))
        keys = [key for batch in group for key in batch.keys]
        parts = zip(lengths, order.split(size), *(tensor.split(size) for tensor in moved), strict=True)
        return [
            ([images, ids[:, :length], *beside], [keys[place] for place in places.tolist()], places.tolist())
            for length, places, images, ids, *beside in parts
        ]

    def _brought(self, batch: _Part, tokens: Packed | None = None) -> list[Any]:
        """Returns a part's tensors on the device; `tokens` are these if they are there already."""
        ids = batch.tokens.to(self._device, non_blocking=True) if tokens is None else tokens
        return [self._whole(batch.images), ids, *map(self._whole, batch.beside)]

    def _whole(self, parts: Sequence[Tensor]) -> Tensor:
        sent = [part.to(self._device, non_blocking=True) for part in parts]
        return sent[0] if len(sent) == 1 else torch.cat(sent)

    def _packed(self, tokens: Tensor, rule: CaptionLength, whole: bool) -> Packed:
        return pack(tokens, rule.needed(tokens), self._device, whole=whole)

    def _received(self, sent: list[Any], *rest: Any) -> MicroBatch:
        for tensor in chain.from_iterable(each if isinstance(each, Packed) else (each,) for each in sent):
            # Another stream allocated their memory and would otherwise reuse it too early.
            tensor.record_stream(self._runtime.current_stream(self._device))
        return self._micro(sent, *rest)

    def _micro(self, sent: list[Any], keys: Sequence[str], places: Sequence[int] | None) -> MicroBatch:
        images, tokens, *beside = sent
        judgements = self._judgements(beside.pop(0)) if self._widths else []
        groups = beside.pop() if beside else None
        return MicroBatch(images, tokens, keys, self._normalised, places, judgements, groups)

    def _judgements(self, targets: Tensor) -> list[Judgement]:
        """Returns what each teacher has stored, of targets [n, 2, D] with their features side by side."""
        parts = targets.to(self._mean.dtype).split(self._widths, dim=2)
        return [
            Judgement(part[:, 0], part[:, 1], *logits)
            for part, logits in zip(parts, self._logits, strict=True)
        ]

    def _normalised(self, images: Tensor) -> Tensor:
        return self._normalise(images, self._mean, self._std)


def _together(batches: Sequence[Batch]) -> _Part:
    tokens = batches[0].tokens if len(batches) == 1 else torch.cat([batch.tokens for batch in batches])
    keys = [key for batch in batches for key in batch.keys]
    beside = [[each.targets for each in batches], [each.groups for each in batches]]
    held = [[part for part in parts if part is not None] for parts in beside]
    return _Part([batch.images for batch in batches], tokens, keys, list(filter(None, held)))


def _moved(parts: Iterator[list[Tensor]], places: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors of all parts, each sample at its new place; a part goes when it is copied."""
    moved: list[Tensor] = []
    for number, part in enumerate(parts):
        moved = moved or [each.new_empty(len(places) * len(each), *each.shape[1:]) for each in part]
        for whole, each in zip(moved, part, strict=True):
            whole.index_copy_(0, places[number], each)
    return moved
