"""Finds files that have changed under a run: their samples no longer lie where the index says. No torch."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property

from trainer.data.files import Stamp, persistent, stamp
from trainer.data.index import Index
from trainer.data.indexed import Indexed
from trainer.data.sample import BadSample
from trainer.errors import InputError
from trainer.text.wording import many

LOOK_S = 10.0
"""Shortest time between two looks: of many bad samples most are of a file that has changed, if one has."""

COPIES = 4
"""Files with other times and the same headers after which a node is known to have copies of its own."""


class Versions:
    """Versions of the files of an index. Threads may call it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._indexed: dict[str, Stamp] = {}
        self._good: dict[str, Stamp] = {}
        """Other versions that hold what was indexed."""

    def of(self, path: str) -> Stamp:
        """Returns a file's size and time of change when it was indexed.

        An index in memory does not say them: there they are those of the first call. Raises StorageError if
        the file cannot be looked at then.
        """
        if path not in self._indexed:
            entry = self._index.entries[self._numbers[path]]
            self._indexed[path] = (
                Stamp(entry.size, entry.changed)
                if entry.size
                else persistent(path, lambda: stamp(path), was_there=True)
            )
        return self._indexed[path]

    def check(self, path: str, now: Stamp) -> None:
        """Raises InputError if a file has changed; a new time alone is none, if its headers are the same.

        After COPIES such files, some headers of each other one are enough, if they are the same.
        """
        before = self.of(path)
        if now in (before, self._good.get(path)):
            return
        is_copy = path not in self._good and len(self._good) >= COPIES
        number = self._numbers[path]
        seems_same = now.size == before.size and is_copy and self._index.seems_as_indexed(number)
        if now.size != before.size or not (seems_same or self._index.is_as_indexed(number)):
            raise InputError(
                f"{path}: the file has changed under the run, and its samples are not where they were: it "
                f"had {many(before.size, 'byte')} ({before.changed}) when it was indexed and has "
                f"{now.size:,} ({now.changed}). Put back what was there and start the run again; other data "
                "are another run."
            )
        self._good[path] = now

    def __contains__(self, path: str) -> bool:
        return path in self._numbers

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {path: number for number, path in enumerate(self._index.paths)}


class Unchanged:
    """Looks at the file of a bad sample, now and then, whether it is still the one that was indexed."""

    def __init__(self, source: object, clock: Callable[[], float] = time.monotonic) -> None:
        self._versions = Versions(source.index) if isinstance(source, Indexed) else None
        self._clock, self._look_at = clock, clock()

    def check(self, bad: Sequence[BadSample]) -> None:
        """Raises InputError if the file of the first of the bad samples has changed."""
        if not bad or self._versions is None or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_S
        path = bad[0].origin
        try:
            now = stamp(path) if path in self._versions else None
        except Exception:  # whatever storage raises: reading says more of it
            return
        if now is not None:
            self._versions.check(path, now)
