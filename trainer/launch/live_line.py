"""The line that `clipship run` rewrites in a terminal while rank 0 works and prints nothing. No torch.

It is short and ends at the first column, so that the next line of a rank covers it. Elsewhere than in a
terminal one whole line says that the start takes its time, and log files get no more than that.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from trainer.config.phases import SILENT
from trainer.supervise.heartbeat import RankState
from trainer.text.terminal import say
from trainer.text.wording import many

FROM_S = 1.0
"""Seconds of silence after which the line appears."""
_EVERY_S = 0.25
_SHUTDOWN = "shutdown"
_ERASE = "\r\x1b[K"
_WORDS = {"init": "starting", _SHUTDOWN: "ending"}


def words(state: RankState | None, *, begun: bool, since: float, now: float) -> str:
    """Returns what the line says now; "" if ranks speak for themselves.

    `since` is when the launcher began, on the clock of `time.monotonic`, as `now` and the state's `began`.
    `begun` says that rank 0's supervisor has been seen.
    """
    if state is None:
        phase, began = (_SHUTDOWN, now) if begun else ("init", since)
    else:
        phase, began = state.phase, since if state.phase == "init" else state.began
    if phase not in (*SILENT, _SHUTDOWN) or now - began < FROM_S:
        return ""
    return f"{_WORDS.get(phase, phase)}  {now - began:.0f} s"


class LiveLine:
    """Shows the line from `with` to its end, in a thread of its own."""

    def __init__(
        self, state: Callable[[], tuple[RankState | None, bool]], ranks: int, out: TextIO | None = None
    ) -> None:
        """`state` returns rank 0's state and whether its supervisor has begun; see `published_state`."""
        self._state, self._ranks, self._out = state, ranks, out or sys.stderr
        self._over = threading.Event()
        in_terminal = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._thread = threading.Thread(target=self._rewrite if in_terminal else self._say_once, daemon=True)

    def __enter__(self) -> "LiveLine":
        self._since = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _say_once(self) -> None:
        if not self._over.wait(FROM_S):
            say(f"starting {many(self._ranks, 'rank')}: importing torch, connecting")

    def _rewrite(self) -> None:
        shown = ""
        while not self._over.wait(_EVERY_S):
            state, begun = self._state()
            text = words(state, begun=begun, since=self._since, now=time.monotonic())
            if text != shown:
                self._write(f"{_ERASE}{text}\r")
            shown = text
        if shown:
            self._write(_ERASE)

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            self._over.set()  # the terminal is gone
