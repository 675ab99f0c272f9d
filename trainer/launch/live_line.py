"""Tells people what `clipship run` does while rank 0 works and prints nothing, and on a signal. No torch.

In a terminal it rewrites one line: what rank 0 does, for how long, and how long that took the last time.
Elsewhere one whole line says that the start takes its time, and log files get no more than that.
"""

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO, get_args

from trainer.config.phases import NOTHING_DONE, SILENT, Stage
from trainer.text.live import FROM_S, LiveText, seconds
from trainer.text.terminal import say
from trainer.text.wording import many
from trainer.world.heartbeat import RankState

STARTING, ENDING = "starting ranks", "ending"
START = (STARTING, *get_args(Stage))
"""Parts of a start, up to the first step."""
_LEAST_S = 1.0
"""Shorter times are not shown."""


@dataclass(frozen=True)
class Part:
    """Stage of rank 0: its name for people, and the time at which it began."""

    name: str
    began: float
    step: int | None = None
    """Number of the step, if it is one."""
    waits_for_data: bool = False


def part_of(state: RankState | None, *, begun: bool, since: float) -> Part | None:
    """Returns what rank 0 does; None if its supervisor has ended.

    `since` is when the launcher began. `begun` says that rank 0's supervisor has been seen.
    """
    if state is None:
        return None if begun else Part(STARTING, since)
    if state.phase == "init":
        return Part(state.stage or STARTING, state.stage_began or since)
    if state.phase in SILENT:
        return Part(state.phase, state.began)
    if state.phase == "shutdown":
        return Part(ENDING, state.began)
    return Part(f"step {state.step:,}", state.began, state.step, state.phase == "data")


def words(part: Part, now: float, last: Mapping[str, float], *, short: bool = False) -> str:
    """Returns the line for a part; `last` has the seconds of the parts that this run has had before.

    Times are on the clock of `time.monotonic`. `short` leaves out all but the part and its seconds.
    """
    taken, expected = now - part.began, last.get(part.name, 0.0)
    if part.step is not None:
        doing = ", waiting for data" if part.waits_for_data and not short else ""
        return f"{part.name}{doing}  {seconds(taken)}" if taken >= _LEAST_S else part.name
    line = f"{part.name}  {seconds(taken)}"
    if short or expected < _LEAST_S:
        return line
    before = f" of about {seconds(expected)}" if taken <= expected else f" ({seconds(expected)} last time)"
    return line + before


class LiveLine:
    """Shows the line from `with` to its end."""

    def __init__(
        self,
        state: Callable[[], tuple[RankState | None, bool]],
        ranks: int,
        *,
        every_steps: int = 1,
        short: bool = False,
        out: TextIO | None = None,
    ) -> None:
        """`state` returns rank 0's state and whether its supervisor has begun; see `published_state`.

        Rank 0 prints a line after `every_steps` steps. `short` is for ranks that cannot erase the line before
        they print.
        """
        self._state, self._ranks, self._every_steps = state, ranks, every_steps
        self._short = short
        self._since: float | None = None
        self._part: Part | None = None
        self._spoken: tuple[object, float] = (None, 0.0)
        """Name of what is silent, and since when."""
        self._last: dict[str, float] = {}
        """Seconds of each part that has ended, the last time."""
        self._over = threading.Event()
        self._live = LiveText(self.line, out or sys.stderr)
        self._thread = threading.Thread(target=self._say_once, daemon=True)

    @property
    def moves(self) -> bool:
        """True if the line is shown, in a terminal."""
        return self._live.moves

    def __enter__(self) -> "LiveLine":
        with suppress(RuntimeError):  # there may be no more threads: the run goes on without the line
            if self.moves:
                self._live.__enter__()
            else:
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.moves:
            self._live.__exit__()
        elif self._thread.is_alive():
            self._thread.join()

    def line(self, now: float) -> str:
        """Returns what the line says at this time; "" if ranks speak for themselves."""
        since = self._since = now if self._since is None else self._since
        state, begun = self._state()
        part = part_of(state, begun=begun, since=since)
        self._time(part)
        if part is None or now - self._silent_since(part, since) < FROM_S:
            return ""
        return words(part, now, self._last, short=self._short)

    def _time(self, part: Part | None) -> None:
        """Records how long the part took that has ended, if another one has begun."""
        before, self._part = self._part, part
        if before is not None and part is not None and before != part and before.step is None:
            self._last[before.name] = part.began - before.began

    def _silent_since(self, part: Part, since: float) -> float:
        """Returns when rank 0 last printed: at the begin of a part, and after each `every_steps` steps.

        The parts of a start count as one, so that the line stays from the begin to the first step.
        """
        if part.name in START:
            return since
        what = part.name if part.step is None else (part.step - 1) // self._every_steps
        if what != self._spoken[0]:
            self._spoken = what, part.began
        return self._spoken[1]

    def _say_once(self) -> None:
        if not self._over.wait(FROM_S):
            say(f"starting {many(self._ranks, 'rank')}: importing torch, connecting")


AGREED_AFTER = 2
"""Steps until all ranks know of one rank's request and stop at the same step; see
`trainer.train.loop`."""


def line_for_signal(
    number: int, times: int, state: RankState | None, *, begun: bool, here: bool, saves: bool
) -> str:
    """Returns the line for the signal when it comes for the first or second time; "" for later ones.

    `state` is what rank 0 is doing, None if not known; `begun` says that it was known before. `here` says
    that rank 0 runs on this machine, so that it will be known. `saves` says that there are steps and
    checkpoints.
    """
    if times > 2 or (times > 1 and number != signal.SIGINT):
        return ""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    if times > 1:
        return f"clipship: {name} again: exiting at once, nothing more is saved"
    again = "; press Ctrl-C again to exit at once" if number == signal.SIGINT else ""
    return f"clipship: {name}{_now(state, begun, here, saves)}{again}"


def _now(state: RankState | None, begun: bool, here: bool, saves: bool) -> str:
    if state is None and begun:
        return ": the ranks have ended, exiting"
    if not saves:
        return ": exiting"
    if state is None and not here:
        return ": asking the ranks to save their step and to exit"
    if state is None or state.phase in NOTHING_DONE:
        return " before the first step is done: there is nothing to save, exiting"
    if state.phase == "shutdown":
        return " while the ranks exit: everything is saved"
    where = (
        f"step {state.step}" if state.phase in ("data", "step") else f"the {state.phase} of step {state.step}"
    )
    return f" in {where}: saving at about step {state.step + AGREED_AFTER}, then exiting"
