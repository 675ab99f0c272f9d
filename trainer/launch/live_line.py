"""Tells people what `clipship run` does while rank 0 works and prints nothing, and on a signal. No torch.

In a terminal it rewrites one line: what rank 0 does, for how long, and how long that took the last time,
which is kept in the user's state: a hint, without which nothing fails. Elsewhere one whole line says that the
start takes its time, and log files get no more than that.
"""

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, get_args

from trainer.config import Job
from trainer.config.phases import NOTHING_DONE, SILENT, Stage
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import read_json
from trainer.sysinfo.user_cache import user_state
from trainer.text.live import FROM_S, LiveText, seconds
from trainer.text.terminal import say
from trainer.text.wording import many
from trainer.world.heartbeat import RankState

STARTING, FIRST_STEP, ENDING = "starting ranks", "first step", "ending"
START = (STARTING, *get_args(Stage), FIRST_STEP)
"""Parts of a start in their order, up to the line of the first step."""
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
    """Returns the line for a part; `last` has the seconds of the parts the last time.

    Times are on the clock of `time.monotonic`. `short` leaves out all but the part and its seconds.
    """
    taken, expected = now - part.began, last.get(part.name, 0.0)
    if part.step is not None:
        doing = ", waiting for data" if part.waits_for_data and not short else ""
        return f"{part.name}{doing}  {seconds(taken)}" if taken >= _LEAST_S else part.name
    line = f"{part.name}  {seconds(taken)}"
    if short or part.name not in last:
        return line
    if expected >= _LEAST_S:
        line += f" of about {seconds(expected)}" if taken <= expected else f" ({seconds(expected)} last time)"
    later = START[START.index(part.name) + 1 :] if part.name in START else ()
    if not later or FIRST_STEP not in last:
        return line
    left = max(0.0, expected - taken) + sum(last.get(name, 0.0) for name in later)
    return f"{line}, first step done in about {seconds(left)}"


class LiveLine:
    """Shows the line from `with` to its end."""

    def __init__(
        self,
        state: Callable[[], tuple[RankState | None, bool]],
        ranks: int,
        *,
        every_steps: int = 1,
        last: Mapping[str, float] | None = None,
        short: bool = False,
        out: TextIO | None = None,
    ) -> None:
        """`state` returns rank 0's state and whether its supervisor has begun; see `published_state`.

        Rank 0 prints a line after `every_steps` steps. `last` has the seconds of each part the last time.
        `short` is for ranks that cannot erase the line before they print.
        """
        self._state, self._ranks, self._every_steps = state, ranks, every_steps
        self._last, self._short = dict(last or {}), short
        self._since: float | None = None
        self._part: Part | None = None
        self._spoken: tuple[object, float] = (None, 0.0)
        """Name of what is silent, and since when."""
        self.times: dict[str, float] = {}
        """Seconds of the parts that have ended, of each the first one."""
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
        if before is None or part is None or before == part or before.step is not None:
            return
        ended = {before.name: part.began - before.began}
        if before.name in START[:-1] and part.name not in START:
            ended[FIRST_STEP] = 0.0  # it was over before the line looked
        for name, taken in ended.items():
            self.times.setdefault(name, taken)
            self._last.setdefault(name, taken)

    def _silent_since(self, part: Part, since: float) -> float:
        """Returns when rank 0 last printed: at the begin of a part, and after each `every_steps` steps.

        The parts of a start count as one, so that the line stays from the begin to the first step.
        """
        if part.name in START[:-1]:
            return since
        what = part.name if part.step is None else (part.step - 1) // self._every_steps
        if what != self._spoken[0]:
            self._spoken = what, part.began
        return self._spoken[1]

    def _say_once(self) -> None:
        if not self._over.wait(FROM_S):
            say(f"starting {many(self._ranks, 'rank')}: importing torch, connecting")


_KEPT = 50
"""Kinds of starts whose times are kept, the newest ones."""


class StartTimes:
    """Seconds of each part of a run of this job with this many ranks, of the last such run."""

    def __init__(self, job: Job, ranks: int) -> None:
        parts = (job.model.name, job.model.precision, job.comm.backend, job.optim.global_batch_size, ranks)
        self._kind = " ".join(map(str, parts))

    def read(self) -> dict[str, float]:
        """Returns the seconds by the name of the part; empty if no such start is known."""
        times = _all_kinds().get(self._kind)
        if not isinstance(times, dict):
            return {}
        return {name: float(taken) for name, taken in times.items() if isinstance(taken, int | float)}

    def keep(self, times: Mapping[str, float]) -> None:
        """Writes these seconds over the last ones; those of parts that are not among them stay."""
        path = _file()
        if path is None or not times:
            return
        kinds = _all_kinds()
        rounded = {name: round(taken, 2) for name, taken in times.items()}
        newest = {**self.read(), **rounded}
        kinds.pop(self._kind, None)
        with suppress(OSError):
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            write_json(path, dict([*kinds.items(), (self._kind, newest)][-_KEPT:]))


def _file() -> Path | None:
    folder = user_state("starts")
    return folder and folder / "seconds.json"


def _all_kinds() -> dict[str, object]:
    path = _file()
    with suppress(OSError, ValueError):
        kinds = read_json(path) if path else {}
        return kinds if isinstance(kinds, dict) else {}
    return {}


AGREED_AFTER = 2
"""Steps until all ranks know of one rank's request and stop at the same step; see
`trainer.comm.consensus`."""


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
