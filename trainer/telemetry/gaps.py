"""Lets a run go on without numbers that cannot be written, and says so. No torch."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("clipship")


class Gaps:
    """Names each file or service that cannot be written, once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    @contextmanager
    def tolerated_in(self, what: str, problems: type[Exception] = OSError) -> Iterator[None]:
        """Lets the run go on where the block raises one of the problems, such as that the disk is full."""
        try:
            yield
        except problems as error:
            if what not in self._told:
                log.warning(
                    "%-12s NOT WRITTEN: %s. The run goes on, but %s will have gaps.", "metrics", error, what
                )
            self._told.add(what)
