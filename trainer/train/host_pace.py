"""Notices a GPU that waits for the host, step after step, and says what helps.

The host reads how a step ended when the next one is under way. If the answer is always there already, the GPU
was done before the host had given it more. Imports no torch.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.telemetry.records import Lap

log = logging.getLogger("clipship")

_STEPS = 50
"""Steps that decide, after those of the first record."""
_WAITED = 0.02
"""Share of the time that a host which is ahead of its GPU waits for it at least."""
_DATA = 0.3
"""Share of the time beyond which the GPU waits for data: to pack and to send them is the host's work, too."""


class HostPace:
    """Measures how long the host waits for the GPU, and speaks once at most."""

    def __init__(self, *, advises: bool) -> None:
        """`advises` is true on one rank of a job that `model.cuda_graphs` would help."""
        self._advises = advises
        self._waited_s = 0.0
        self._known: Lap | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as the host's wait for the GPU."""
        start = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - start

    def record(self, lap: Lap, elsewhere_s: float) -> None:
        """Takes the times of the steps since the last record, and decides when there are enough.

        `elsewhere_s` are the seconds of all steps in which the host may have waited for the GPU elsewhere.
        """
        if self._known is None:  # the first steps of a start tell nothing of the others
            self._known, self._waited_s = Lap(), -elsewhere_s
            return
        self._known += lap
        if not self._advises or self._known.steps < _STEPS:
            return
        self._advises = False
        whole_s = self._known.steps * self._known.per_step()["step_s"]
        if self._waited_s + elsewhere_s < _WAITED * whole_s and self._known.data_s < _DATA * whole_s:
            log.info(
                "%-12s the GPU waits for the host, which needs %.1f ms for a step: model.cuda_graphs = true "
                "spares most of that, and a larger batch gives the GPU more to do",
                "speed",
                1e3 * whole_s / self._known.steps,
            )
