"""A line that is rewritten in a terminal while a person waits: what is done, and how much of it. No torch.

The line ends at the first column, so that the next line covers it; programs that print beside it begin their
lines with `trainer.text.terminal.erased`.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from trainer.text.fitting import terminal_columns
from trainer.text.terminal import ERASE, can_move, say
from trainer.text.wording import many

FROM_S = 1.0
"""Seconds of silence after which the line appears."""
_EVERY_S = 0.25
_SAID_EVERY_S = 10.0
"""Seconds between two lines about the progress of a work where there is no terminal."""


class LiveText:
    """Shows what `text` returns, from `with` to its end, in a thread of its own; "" shows nothing.

    `text` gets the time on the clock of `time.monotonic`, a few times a second.
    """

    def __init__(self, text: Callable[[float], str], out: TextIO | None = None) -> None:
        self._text, self._out = text, out or sys.stderr
        self.moves = can_move(self._out)
        """True if the line is shown, in a terminal."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._rewrite, daemon=True)

    def __enter__(self) -> "LiveText":
        if self.moves:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _rewrite(self) -> None:
        shown = ""
        while not self._over.wait(_EVERY_S):
            text = self._text(time.monotonic())[: _columns(self._out)]
            if text != shown:
                self._write(f"{ERASE}{text}\r")
            shown = text
        if shown:
            self._write(ERASE)

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            self._over.set()  # the terminal is gone


def waiting(what: str, out: TextIO | None = None) -> LiveText:
    """Shows what this process does, with its seconds, if that takes longer than a second."""
    began = time.monotonic()
    return LiveText(lambda now: f"{what}  {seconds(now - began)}" if now - began >= FROM_S else "", out)


@contextmanager
def progress(begin: str, verb: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how far a work is: in a terminal in a line that is rewritten, elsewhere in a line now and then.

    Yields the function that gets the number of units so far and of all. Until its first call the line is
    `begin`, then it is such as `packed 3 of 12 rows`: verb, numbers, unit.
    """
    began, text = time.monotonic(), begin
    said = math.inf

    def done(count: int, total: int) -> None:
        nonlocal said, text
        text, now = f"{verb} {count:,} of {many(total, unit)}", time.monotonic()
        said = min(said, now)  # it begins with the first call
        if not line.moves and now - said > _SAID_EVERY_S:
            said = now
            say(text)

    with LiveText(lambda now: f"{text}  {seconds(now - began)}") as line:
        yield done


def seconds(count: float) -> str:
    """Returns whole seconds as `7 s`, from two minutes on as `2 min 7 s`."""
    minutes, rest = divmod(int(count), 60)
    return f"{minutes:,} min {rest} s" if minutes > 1 else f"{int(count)} s"


def _columns(out: TextIO) -> int | None:
    """Returns how many columns the line may have: one less than the terminal; None if it does not say."""
    columns = terminal_columns(out)
    return columns - 1 if columns > 1 else None
