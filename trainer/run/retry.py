"""Tries again after a wait: what other machines and storage may still do. Imports no torch."""

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
_DOUBLINGS = 50
"""Most doublings of a wait, before its longest value counts."""
jitter: Callable[[], float] = random.SystemRandom().random
"""Returns numbers from 0 to below 1, which differ from rank to rank whatever seeds the job has."""


@dataclass(frozen=True)
class Backoff:
    """Waits that double from failure to failure, up to the longest one."""

    first_s: float
    longest_s: float

    def wait_s(self, failures: int, jitter: float = 0.0) -> float:
        """Returns the seconds to wait after so many failures in a row, from 1.

        `jitter`, from 0 to 1, leaves out up to half of them, so that many who wait do not all come at once.
        """
        wait_s = min(self.first_s * 2.0 ** min(failures - 1, _DOUBLINGS), self.longest_s)
        return wait_s * (1.0 - 0.5 * jitter)

    def within(self, longest_s: float) -> Iterator[float]:
        """Yields the waits for so many seconds, from the first on."""
        return _until(longest_s, self.wait_s)


def every(wait_s: float, longest_s: float) -> Iterator[float]:
    """Yields the same wait for so many seconds, from the first on; the last one is what is left of them."""
    return _until(longest_s, lambda _: wait_s)


def _until(longest_s: float, wait_s: Callable[[int], float]) -> Iterator[float]:
    deadline, failures = time.monotonic() + longest_s, 0
    while (left := deadline - time.monotonic()) > 0:
        failures += 1
        yield min(wait_s(failures), left)


def retried(
    attempt: Callable[[], Result],
    waits_s: Iterable[float],
    may_pass: Callable[[Exception], bool],
    tell: Callable[[Exception, float], object] = lambda error, wait_s: None,
    least_s: Callable[[Exception], float] = lambda error: 0.0,
) -> Result:
    """Returns the result of `attempt`, which is made again after each wait if its error may pass.

    Each wait is up to half longer, so that a thousand ranks that fail together do not ask together again.
    `tell` gets each error that is tried again, and the wait; `least_s` says how long an error asks to wait.
    Raises the last error.
    """
    for wait_s in waits_s:
        try:
            return attempt()
        except Exception as error:
            if not may_pass(error):
                raise
            wait_s = max(wait_s, least_s(error)) * (1.0 + 0.5 * jitter())
            tell(error, wait_s)
        time.sleep(wait_s)
    return attempt()


def until(look: Callable[[], Result], waits_s: Iterable[float]) -> Result:
    """Returns the first answer that is true; `look` is asked again after each wait. Else its last answer."""
    for wait_s in waits_s:
        if answer := look():
            return answer
        time.sleep(wait_s)
    return look()


def shown(look: Callable[[], Result], folder: Path, longest_s: float, poll_s: float = 0.2) -> Result:
    """Returns what another machine has written into the folder, once `look` sees it; else its last answer."""

    def look_again() -> Result:
        names_in(folder)
        return look()

    return until(look_again, every(poll_s, longest_s))


def names_in(folder: Path) -> list[str]:
    """Returns the names in a folder; none if it cannot be read.

    That refreshes what a network file system remembers: which names are there, and which are not.
    """
    with suppress(OSError):
        return os.listdir(folder)
    return []
