"""Measures the time that communication takes from a step, on CPUs by the clock, on GPUs by events on the compute stream."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.cuda.Event


class Meter:
    """Sums spans on a device; `pop` gives the seconds so far and starts again."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Mark, Mark]] = []

    def mark(self) -> Mark:
        """This point in the work of the device, without waiting for it."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def since(self, start: Mark) -> None:
        """Add the span from `start` to now."""
        self._spans.append((start, self.mark()))

    @contextmanager
    def span(self) -> Iterator[None]:
        """Add the span of the block."""
        start = self.mark()
        yield
        self.since(start)

    def pop(self) -> float:
        """Seconds in all spans since the last call; on a GPU this waits for the last of them."""
        spans, self._spans = self._spans, []
        return sum(_seconds(start, end) for start, end in spans)


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert not isinstance(start, float)
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
