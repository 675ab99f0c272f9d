"""Keeps a page about a run up to date until the run ends. No torch.

The page that is written meanwhile loads itself again; the last one stays as it is.
"""

import time
from collections.abc import Callable
from pathlib import Path

EVERY_S = 5.0
"""Seconds between two writes of the page, and between two loads of it in a browser."""
_LEAST_PAUSE = 9
"""Factor over the time of a write: the page of a long run takes seconds, and is written less often."""


def wait_for(ready: Callable[[], bool], wait: Callable[[float], object]) -> None:
    """Returns when `ready` is true; asks every EVERY_S."""
    while not ready():
        wait(EVERY_S)


def watch(
    write: Callable[[float | None], Path | str], goes_on: Callable[[], bool], wait: Callable[[float], object]
) -> Path | str:
    """Writes the page every EVERY_S until the run no longer goes on; returns its path or address.

    It writes less often if that takes long. `write` gets the seconds after which a browser loads the page
    again, None for the last page. An interrupt leaves a last page, too, and goes on to the caller. `wait`
    gets seconds.
    """
    try:
        while goes_on():
            began = time.monotonic()
            write(EVERY_S)
            wait(max(EVERY_S, _LEAST_PAUSE * (time.monotonic() - began)))
    except KeyboardInterrupt:
        write(None)
        raise
    return write(None)
