"""Logs the progress of a long evaluation now and then. Imports no torch."""

import logging
import time

log = logging.getLogger("clipship")

EVERY_S = 10.0


class Progress:
    """Progress of one phase; a phase that is done within ten seconds logs nothing."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._logged_at = time.monotonic()

    def done(self, count: int) -> None:
        """Records that `count` of the total are done."""
        now = time.monotonic()
        if now - self._logged_at > EVERY_S:
            log.info("%-12s %d of %d %s", self._what, min(count, self._total), self._total, self._unit)
            self._logged_at = now
