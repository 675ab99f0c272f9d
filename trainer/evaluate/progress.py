"""Tells now and then how far a long evaluation is. Imports no torch."""

import logging
import time

log = logging.getLogger("clipship")

EVERY_S = 10.0


class Progress:
    """Of one phase; says nothing of one that is done within ten seconds."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._said = time.monotonic()

    def done(self, count: int) -> None:
        """So many of the total are done."""
        now = time.monotonic()
        if now - self._said > EVERY_S:
            log.info("%-12s %d of %d %s", self._what, min(count, self._total), self._total, self._unit)
            self._said = now
