"""Splits the seconds of a run, over all its starts and generations, by what they were spent on.

Pure: computes from the lines of goodput.jsonl (`trainer.run.goodput_log`), all times in seconds. A start
counts from the moment its allocation began, as far as the program that starts its supervisors knows it, else
from their own begin; the time before, such as waiting in a scheduler's queue, is not known here. No torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from trainer.errors import EXIT_DONE, EXIT_PREEMPTED

PLANNED = "taken in"
"""Kind of a restart that follows from no fault: nodes came back."""
CAUSES: dict[str, str] = {
    "start": "starting: from the begin of allocation or stage to the first step",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints, as far as training waited",
    "evaluation": "evaluating",
    "stragglers": "waiting for the slowest rank",
    "detection": "noticing a fault: from the last sign of work to the decision",
    "recovery": "starting the ranks again: from the decision to the first step",
    "redone": "steps that a later generation or start did again, or that a fault cut off",
    "other": "everything else: traces, and the end of a start",
}
"""Causes of lost seconds in the order of their display, with a description."""
_UNNAMED = "began "
"""Begin of the id of a start without a launcher."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run: those in steps that counted, and those that were lost, by cause."""

    useful_s: float = 0.0
    lost_s: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """Seconds by cause; has every cause."""

    @property
    def whole_s(self) -> float:
        """Seconds since the run began, without the time between two starts."""
        return self.useful_s + sum(self.lost_s.values())

    @property
    def useful_share(self) -> float | None:
        """Share of the seconds that were spent in steps that counted; None if nothing is known yet."""
        return self.useful_s / self.whole_s if self.whole_s > 0 else None

    def __add__(self, other: "Goodput") -> "Goodput":
        lost = {cause: self.lost_s[cause] + other.lost_s[cause] for cause in CAUSES}
        return Goodput(self.useful_s + other.useful_s, lost)


@dataclass(frozen=True)
class Steps:
    """Seconds of the steps between two records, on rank 0."""

    step: int
    """Last of the steps."""
    steps: int
    seconds: float
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    straggler_s: float = 0.0
    """Seconds by which the slowest rank's own work is longer than that of the others."""

    def __add__(self, later: "Steps") -> "Steps":
        sums = (mine + its for mine, its in zip(astuple(self), astuple(later), strict=True))
        return replace(Steps(*sums), step=later.step)


@dataclass(frozen=True)
class GenerationTimes:
    """Times of one generation of ranks, in seconds since the epoch."""

    start: str
    """Id of the start of the run that it belongs to."""
    number: int
    began: float
    """Time when the supervisors began, or when the fault was reported that ended the generation before."""
    is_first: bool
    """True if it is the first generation of its start."""
    last: float
    """Time of its last line."""
    ready: float | None = None
    """Time when its ranks were about to train; None if they never were."""
    from_step: int = 0
    first: Steps | None = None
    """Its first step, in which loaders start and kernels are made."""
    laps: list[Steps] = field(default_factory=list)
    evaluation_s: float = 0.0
    saves: int = 0
    """Number of checkpoints that it began to write."""
    closed: bool = False
    """True if the training loop came to its end."""
    ended: float | None = None
    """Time when a fault was reported, or when the start ended; None if no line says so."""
    failed: bool = False
    fault: Mapping[str, Any] = field(default_factory=dict)
    """Line about the restart that followed."""
    restart: Mapping[str, Any] = field(default_factory=dict)
    """Line about the restart that began this generation."""
    next_stage: bool = False
    """True if the same ranks went on to the next stage of their run."""
    ranks: int = 0
    """Number of its ranks; 0 if no line says it."""

    @property
    def step(self) -> int:
        """Last step of which there is a line."""
        return self.laps[-1].step if self.laps else self.first.step if self.first else self.from_step


def goodput(events: Sequence[Mapping[str, Any]]) -> Goodput:
    """Returns where the seconds of a run went, from the lines of goodput.jsonl in their order."""
    return account(generations(events))


def account(all_times: Sequence[GenerationTimes]) -> Goodput:
    """Returns where the seconds of these generations went; each step counts in the last one that did it."""
    return sum(by_generation(all_times), Goodput())


def by_generation(all_times: Sequence[GenerationTimes]) -> list[Goodput]:
    """Returns where the seconds of each of these generations went."""
    usual_s, kept, following = usual_step_s(all_times), math.inf, None
    parts = []
    for its in reversed(all_times):
        parts.append(_account(its, kept, following, usual_step_s([its]) or usual_s))
        if its.ready is not None:
            kept, following = min(kept, its.from_step), its.from_step
    return parts[::-1]


def usual_step_s(all_times: Sequence[GenerationTimes]) -> float | None:
    """Returns the mean seconds of a step without its share of checkpoints; None if no lap is known."""
    laps = [lap for its in all_times for lap in its.laps if lap.steps]
    steps = sum(lap.steps for lap in laps)
    return sum(lap.seconds - lap.checkpoint_s for lap in laps) / steps if steps else None


Segment = tuple[str | None, float]
"""Seconds, and what they were lost to; None for those in steps that counted."""


def _account(its: GenerationTimes, kept: float, following: int | None, usual_s: float | None) -> Goodput:
    """Returns where one generation's seconds went.

    `kept` is the last step that no later generation did again, `following` the step from which the next one
    went on, None if there is none.
    """
    useful_s, lost_s = 0.0, dict.fromkeys(CAUSES, 0.0)
    for cause, seconds in _segments(its, kept, following, usual_s):
        if cause is None:
            useful_s += max(0.0, seconds)
        else:
            lost_s[cause] += max(0.0, seconds)
    return Goodput(useful_s, lost_s)


def _segments(
    its: GenerationTimes, kept: float, following: int | None, usual_s: float | None
) -> Iterator[Segment]:
    startup = "start" if its.is_first or its.next_stage else "recovery"
    until = its.ready if its.ready is not None else its.ended if its.ended is not None else its.last
    is_planned = its.restart.get("kind") == PLANNED
    detect_s = 0.0 if is_planned else _number(_table(its.restart.get("parts")).get("detect"))
    yield from _cut(until - its.began, [("detection", detect_s)], startup)
    if its.ready is None:
        return
    if its.first is not None:
        yield from _first(its.first, kept, usual_s, startup)
    for lap in its.laps:
        yield from _lap(lap, kept)
    yield "evaluation", its.evaluation_s
    measured = sum(lap.seconds for lap in its.laps) + (its.first.seconds if its.first else 0.0)
    yield "other", its.last - its.ready - measured - its.evaluation_s
    yield from _tail(its, kept, following, usual_s)


def _cut(gap: float, wanted: Sequence[Segment], rest: str | None) -> Iterator[Segment]:
    """Yields as much of each segment as a gap has room for, in their order, and what is left of it."""
    gap = max(0.0, gap)
    for cause, seconds in wanted:
        taken = max(0.0, min(gap, seconds))
        gap -= taken
        yield cause, taken
    yield rest, gap


def _lap(lap: Steps, kept: float) -> Iterator[Segment]:
    own_s = lap.seconds - min(lap.checkpoint_s, lap.seconds)
    again = min(lap.steps, max(0.0, lap.step - kept)) / lap.steps if lap.steps else 0.0
    yield "checkpoint", lap.seconds - own_s
    wanted = [
        ("redone", again * own_s),
        ("data", (1 - again) * lap.data_s),
        ("stragglers", (1 - again) * lap.straggler_s),
    ]
    yield from _cut(own_s, wanted, None if lap.steps else "other")


def _first(first: Steps, kept: float, usual_s: float | None, startup: str) -> Iterator[Segment]:
    """Yields the segments of the first step: what it takes longer than a usual step belongs to the start."""
    own_s = first.seconds - min(first.checkpoint_s, first.seconds)
    normal_s = own_s - first.data_s if usual_s is None else usual_s * first.steps
    normal_s = max(0.0, min(own_s, normal_s))
    yield "checkpoint", first.seconds - own_s
    yield startup, own_s - normal_s
    yield from _lap(Steps(first.step, first.steps, normal_s), kept)


def _tail(
    its: GenerationTimes, kept: float, following: int | None, usual_s: float | None
) -> Iterator[Segment]:
    """Yields the time after a generation's last line, of which no line says what it was spent on.

    Steps may have been done in it: the next generation says how many were kept, the fault how many were not.
    """
    kept_steps = max(0, min(following or 0, int(min(kept, 1e15))) - its.step)
    if its.ended is None:
        if not its.closed:  # the steps were done after the last line, in time that no line shows
            yield None, kept_steps * (usual_s or 0.0)
        return
    gap = max(0.0, its.ended - its.last)
    if its.closed or not its.failed:
        yield "other", gap
        return
    fault_step = int(_number(its.fault.get("step")))
    lost_steps = max(0, fault_step - 1 - its.step - kept_steps)
    step_s = gap / (kept_steps + lost_steps + 1) if usual_s is None else usual_s
    redone_s = (lost_steps + 1) * step_s  # and the step that the fault cut off
    noticed = "recovery" if its.fault.get("kind") == PLANNED else "detection"
    yield from _cut(gap, [(None, kept_steps * step_s), ("redone", redone_s)], noticed)


def generations(events: Sequence[Mapping[str, Any]]) -> list[GenerationTimes]:
    """Returns the generations that the lines of goodput.jsonl tell of, in their order.

    Lines that lack what they need are passed over.
    """
    # A restart comes again once more is known: its last line counts.
    restarts = {_key(event): event for event in events if event.get("event") == "restart"}
    told: set[tuple[object, ...]] = set()
    found: list[GenerationTimes] = []
    for event in events:
        kind, at = event.get("event"), _number(event.get("time"))
        if at <= 0:
            continue
        if kind == "restart":
            if (key := _key(event)) not in told:
                told.add(key)
                _begin_restart(found, restarts[key], at)
        elif kind == "begin":
            _begin(found, event, at)
        elif kind == "end":
            _end(found, event, at)
        elif found and found[-1].ready is not None:
            found[-1] = _extended(found[-1], event, at)
    return found


def _key(event: Mapping[str, Any]) -> tuple[object, ...]:
    return str(event.get("start")), str(event.get("generation")), _number(event.get("time"))


def _begin_restart(found: list[GenerationTimes], row: Mapping[str, Any], at: float) -> None:
    start = str(row.get("start") or "") or (found[-1].start if found else "")
    if found and found[-1].start == start and found[-1].ended is None:
        found[-1] = replace(found[-1], ended=at, failed=True, fault=row)
    number = int(_number(row.get("generation")))
    ranks = int(_number(row.get("ranks")))
    found.append(GenerationTimes(start, number, at, is_first=False, last=at, restart=row, ranks=ranks))


def _start_of(event: Mapping[str, Any]) -> str:
    """Returns the id of the event's start; one without a launcher has no name, and is known by its begin."""
    began = _number(event.get("began"))
    return str(event.get("start") or "") or (f"{_UNNAMED}{began:.3f}" if began else "")


def _ends(event: Mapping[str, Any], its: GenerationTimes) -> bool:
    """Returns whether the `end` line is about the generation's start.

    Without a launcher each supervisor has its own begin, and any of them may write the line. One with a begin
    after all that this start has done is about a later start.
    """
    if not event.get("start") and (its.start == "" or its.start.startswith(_UNNAMED)):
        return _number(event.get("began")) <= its.last
    return its.start == _start_of(event)


def _begin(found: list[GenerationTimes], event: Mapping[str, Any], at: float) -> None:
    start, number = _start_of(event), int(_number(event.get("generation")))
    from_step, ranks = int(_number(event.get("from_step"))), int(_number(event.get("ranks")))
    same = bool(found and start and found[-1].start == start)
    if same and found[-1].ready is None and found[-1].ended is None:
        ranks = ranks or found[-1].ranks
        found[-1] = replace(found[-1], ready=at, last=at, from_step=from_step, ranks=ranks)
        return
    next_stage = same and found[-1].closed
    if same:  # the supervisors began again, too, or the run went to its next stage
        before = found[-1]
        began = before.ended if before.ended is not None else before.last
        found[-1] = replace(before, ended=began)
    else:
        began = _number(event.get("began")) or at
        if found:  # one start at a time writes a run folder
            began = max(began, found[-1].last if found[-1].ended is None else found[-1].ended)
    its = GenerationTimes(start, number, min(began, at), not same, last=at, ready=at, from_step=from_step)
    found.append(replace(its, next_stage=next_stage, ranks=ranks))


def _end(found: list[GenerationTimes], event: Mapping[str, Any], at: float) -> None:
    start, code = _start_of(event), event.get("exit_code")
    if found and _ends(event, found[-1]):
        if found[-1].ended is None:
            failed = code not in (EXIT_DONE, EXIT_PREEMPTED)
            found[-1] = replace(found[-1], ended=at, failed=failed)
    elif code != EXIT_DONE:  # a start whose ranks never began to train; a run that is done loses nothing
        began = _number(event.get("began")) or at
        found.append(GenerationTimes(start, 1, min(began, at), is_first=True, last=at, ended=at, failed=True))


def _extended(its: GenerationTimes, event: Mapping[str, Any], at: float) -> GenerationTimes:
    """Returns the generation with one more line of rank 0."""
    its = replace(its, last=max(its.last, at))
    match event.get("event"):
        case "steps":
            if its.first is None:
                return replace(its, first=steps_of(event))
            its.laps.append(steps_of(event))
        case "evaluation":
            return replace(its, evaluation_s=its.evaluation_s + _number(event.get("seconds")))
        case "save":
            return replace(its, saves=its.saves + 1)
        case "close":
            return replace(its, closed=True)
    return its


def steps_of(event: Mapping[str, Any]) -> Steps:
    """Returns the seconds of a `steps` line."""
    names = ("seconds", "data_s", "checkpoint_s", "straggler_s")
    whole = (int(_number(event.get(name))) for name in ("step", "steps"))
    return Steps(*whole, *(_number(event.get(name)) for name in names))


def shown_causes(times: Goodput) -> Iterator[tuple[str, float]]:
    """Yields the causes that took at least a thousandth of the time, the largest first."""
    least = times.whole_s / 1000
    for cause, seconds in sorted(times.lost_s.items(), key=lambda pair: -pair[1]):
        if seconds >= least and seconds > 0:
            yield cause, seconds


def _number(value: object) -> float:
    """Returns a finite number above 0; 0 for everything else that a file may hold."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value < 1e15 else 0.0  # type: ignore[operator, return-value]


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
