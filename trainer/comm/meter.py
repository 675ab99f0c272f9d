"""Measures the time that communication takes from a step, on CPUs by the clock, on GPUs by events on the compute stream.

It also tells the rank's pulse of each collective, so that a supervisor can say which one a rank is in.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.health.pulse import Pulse

Mark = float | torch.cuda.Event


class Meter:
    """Sums spans on a device; `pop` gives the seconds so far and starts again."""

    def __init__(self, device: torch.device, pulse: Pulse) -> None:
        self._pulse = pulse
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Mark, Mark]] = []
        self._bytes = 0

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
    def span(self, collective: str, nbytes: int = 0) -> Iterator[None]:
        """Add the span of the block, which is one collective that takes so many bytes from this rank."""
        start = self.mark()
        self._bytes += nbytes
        with self.inside(collective):
            yield
        self.since(start)

    @contextmanager
    def inside(self, collective: str) -> Iterator[None]:
        """The block is one collective whose time is nobody's concern. A rank that fails in it is left in it."""
        self._pulse.collective(collective)
        yield
        self._pulse.waiting(False)

    def sent(self, collective: str, nbytes: int = 0) -> None:
        """One more collective is under way, with so many bytes of this rank's, and the rank goes on."""
        self._bytes += nbytes
        self._pulse.collective(collective, waiting=False)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the span of the block, which waits for what was sent."""
        start = self.mark()
        self._pulse.waiting(True)
        yield
        self._pulse.waiting(False)
        self.since(start)

    def pop_bytes(self) -> int:
        """What this rank gave to collectives since the last call."""
        nbytes, self._bytes = self._bytes, 0
        return nbytes

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
