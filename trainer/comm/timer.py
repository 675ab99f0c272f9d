"""Measures the time that communication takes from a step.

On CPUs it reads the clock, on GPUs it records events on the compute stream. It also records each collective
in the rank's heartbeat, so that the supervisor can say which one a rank is in.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from operator import not_

import torch

from trainer.comm.accelerator import on_accelerator, runtime
from trainer.world.heartbeat import Heartbeat

Mark = float | torch.Event


class CommTimer:
    """Collects time spans on a device; `pop` returns the sum of those that have ended, in seconds."""

    def __init__(self, device: torch.device, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._event: Callable[..., torch.Event] | None = (
            runtime(device).Event if on_accelerator(device) else None
        )
        self._spans: list[tuple[Mark, Mark]] = []
        self._bytes = 0

    def mark(self) -> Mark:
        """Returns the current point in the device's work, without waiting for the device."""
        if self._event is None:
            return time.perf_counter()
        event = self._event(enable_timing=True)
        event.record()
        return event

    def since(self, start: Mark) -> None:
        """Adds the span from `start` to now."""
        self._spans.append((start, self.mark()))

    @contextmanager
    def span(self, collective: str, nbytes: int = 0) -> Iterator[None]:
        """Adds the span of the block, which is one collective that takes `nbytes` bytes from this rank."""
        start = self.mark()
        self._bytes += nbytes
        with self.inside(collective):
            yield
        self.since(start)

    @contextmanager
    def inside(self, collective: str) -> Iterator[None]:
        """Records in the heartbeat that the block is one collective, without measuring it.

        If the block raises, the heartbeat still shows the rank in that collective.
        """
        self._heartbeat.begin_collective(collective)
        yield
        self._heartbeat.set_waiting(False)

    @contextmanager
    def starting(self, collective: str, nbytes: int = 0, *, then_waits: bool = False) -> Iterator[None]:
        """Records that the block starts one more collective, with `nbytes` bytes of this rank.

        The rank goes on behind it, or waits until `arrived`. If the block raises, the heartbeat still shows
        the rank in that collective: another one has probably ended.
        """
        self._bytes += nbytes
        self._heartbeat.begin_collective(collective)
        yield
        if not then_waits:
            self.arrived()

    def arrived(self) -> None:
        """Records that the rank waits for no collective any more."""
        self._heartbeat.set_waiting(False)

    @contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """Adds the span of the block, which waits for a collective that is under way.

        `collective` is the name by which it was started. If the block raises, the heartbeat still shows the
        rank in it.
        """
        start = self.mark()
        self._heartbeat.wait_in(collective)
        yield
        self._heartbeat.set_waiting(False)
        self.since(start)

    def pop_bytes(self) -> int:
        """Returns the bytes that this rank gave to collectives since the last call."""
        nbytes, self._bytes = self._bytes, 0
        return nbytes

    def pop(self) -> float:
        """Returns the seconds in all spans that have ended since the last call.

        Spans that a GPU is still working on are left to a later call: nobody waits for them.
        """
        ended = [_has_passed(end) for _, end in self._spans]
        spans, self._spans = list(compress(self._spans, ended)), list(compress(self._spans, map(not_, ended)))
        return sum(_seconds(start, end) for start, end in spans)


def _has_passed(mark: Mark) -> bool:
    return isinstance(mark, float) or mark.query()


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert not isinstance(start, float)
    assert not isinstance(end, float)
    return float(start.elapsed_time(end)) / 1000
