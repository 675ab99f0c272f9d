"""From the loader's bytes to micro-batches on the device, normalised there. On a GPU the next ones travel while this step computes."""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from trainer.data.loader import Batch
from trainer.data.pixels import normalised
from trainer.step import MicroBatch

Sent = tuple[Tensor, Tensor, Sequence[str]]
"""Images and tokens on the device, and the samples' keys."""


class Feed:
    """Where images go and what they become: uint8 in, `dtype` out, less the mean and over the standard deviation of each channel."""

    def __init__(self, device: torch.device, dtype: torch.dtype, mean: Sequence[float], std: Sequence[float]) -> None:
        self._device = device
        self._mean, self._std = (torch.tensor(channels, dtype=dtype, device=device) for channels in (mean, std))

    def steps(self, batches: Iterator[Batch], accumulation: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step. On a GPU one step is fetched ahead, on a stream of its own."""
        groups = iter(lambda: list(islice(batches, accumulation)), [])
        if self._device.type != "cuda":
            return ([self._micro(batch.images, batch.tokens, batch.keys) for batch in group] for group in groups)
        return self._ahead(groups)

    def _ahead(self, groups: Iterator[list[Batch]]) -> Iterator[list[MicroBatch]]:
        stream = torch.cuda.Stream(self._device)
        waiting, arrived = self._sent(groups, stream)
        while waiting:
            following, arrives = self._sent(groups, stream)
            torch.cuda.current_stream(self._device).wait_event(arrived)
            yield [self._received(*batch) for batch in waiting]
            waiting, arrived = following, arrives

    def _sent(self, groups: Iterator[list[Batch]], stream: torch.cuda.Stream) -> tuple[list[Sent], torch.cuda.Event]:
        """The next step's bytes, on their way; pinned memory makes the copies run beside the computation."""
        group = next(groups, [])
        with torch.cuda.stream(stream):
            sent: list[Sent] = [
                (batch.images.to(self._device, non_blocking=True), batch.tokens.to(self._device, non_blocking=True), batch.keys)
                for batch in group
            ]
        return sent, stream.record_event()

    def _received(self, images: Tensor, tokens: Tensor, keys: Sequence[str]) -> MicroBatch:
        for tensor in (images, tokens):
            tensor.record_stream(torch.cuda.current_stream(self._device))  # their memory is the other stream's to give away
        return self._micro(images, tokens, keys)

    def _micro(self, images: Tensor, tokens: Tensor, keys: Sequence[str]) -> MicroBatch:
        return MicroBatch(normalised(images, self._mean, self._std), tokens, keys)
