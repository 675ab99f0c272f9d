"""Counts the samples that a rank had to skip, names each in its log, and ends the run where they are too many. No torch."""

import logging
from collections import Counter
from collections.abc import Sequence

from trainer.data.sample import BadSample
from trainer.errors import InputError

# Of this name, records below a warning go to the rank's log file and not to the console.
log = logging.getLogger("clipship.data")
JUDGED_FROM = 1000
SHOWN = 3


class Skipped:
    """One rank's, since this start."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self.seen = 0
        self.by_cause: Counter[str] = Counter()
        self._first: list[BadSample] = []

    @property
    def count(self) -> int:
        """Samples skipped."""
        return self.by_cause.total()

    def note(self, samples: int, bad: Sequence[BadSample]) -> None:
        """So many samples came, and in their places these were skipped. Raises InputError where the share is too large."""
        self.seen += samples
        for sample in bad:
            self.by_cause[sample.cause] += 1
            log.info("skipped (%s): %s", sample.cause, sample)
        self._first = [*self._first, *bad][:SHOWN]
        if self.count > self._max_share * max(self.seen, JUDGED_FROM):
            raise InputError(self._too_many())

    def _too_many(self) -> str:
        causes = ", ".join(f"{count} {cause}" for cause, count in self.by_cause.most_common())
        examples = "".join(f"\n  {sample}" for sample in self._first)
        return (
            f"{self.count} bad samples among {self.seen} ({causes}): data.max_bad_share = {self._max_share:g} allows "
            f"{self._max_share * max(self.seen, JUDGED_FROM):.0f}. Mend the data or allow more. The first:{examples}"
        )
