"""Finds files that have changed under a run: their samples no longer lie where the index says. No torch."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from trainer.data.files import Stamp, stamp
from trainer.data.indexed import Indexed
from trainer.data.sample import BadSample
from trainer.errors import InputError
from trainer.text.wording import many

LOOK_S = 10.0
"""Shortest time between two looks: of many bad samples most are of a file that has changed, if one has."""


def changed(path: str, before: Stamp, now: Stamp) -> InputError:
    """Returns the error for a file that is another one than when it was indexed."""
    return InputError(
        f"{path}: the file has changed under the run, and its samples are not where they were: it had "
        f"{many(before.size, 'byte')} ({before.changed}) when it was indexed and has {now.size:,} "
        f"({now.changed}). Put back what was there and start the run again; other data are another run."
    )


class Unchanged:
    """Looks at the file of a bad sample, now and then, whether it is still the one that was indexed."""

    def __init__(self, source: object, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._look_at = clock()
        self._indexed: Mapping[str, Stamp] | None = None

    def check(self, bad: Sequence[BadSample]) -> None:
        """Raises InputError if the file of the first of the bad samples has changed."""
        if not bad or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_S
        path = bad[0].origin
        if (before := self._stamps().get(path)) is None:
            return
        now = before
        with suppress(Exception):  # whatever storage raises: reading says more of it
            now = stamp(path)
        if now != before:
            raise changed(path, before, now)

    def _stamps(self) -> Mapping[str, Stamp]:
        """Returns size and time of change of each file when it was indexed."""
        if self._indexed is None:
            index = self._source.index if isinstance(self._source, Indexed) else None
            named = zip(index.paths, index.entries, strict=True) if index else ()
            self._indexed = {path: Stamp(entry.size, entry.changed) for path, entry in named if entry.size}
        return self._indexed
