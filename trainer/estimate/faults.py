"""Simulates a run with faults: which share of its time will be useful, how often to save, what a spare buys.

Pure: a discrete simulation of one run from fault to fault, with faults drawn from a seed or given. All times
are in seconds unless a name says otherwise. Young's and Daly's formulas for the best checkpoint interval
stand beside it as a check. No torch.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trainer.errors import InputError

HOUR_S = 3600.0
CAUSES: dict[str, str] = {
    "start": "starting, once",
    "steps": "data, evaluation and stragglers, while training goes on",
    "checkpoint": "saving checkpoints, as far as training waits",
    "detection": "noticing faults",
    "recovery": "starting the ranks again",
    "redone": "steps done again",
    "nodes": "waiting for a node, since too few are left",
}
"""Causes of lost time in the order of their display, with a description."""
_REPEATS = 5
_FAULTS = 2000.0
"""Faults in one repeat, on average."""
_AROUND = tuple(2.0 ** (step / 4) for step in range(-4, 5))
"""Factors on Daly's interval at which the simulation looks for the best one."""


@dataclass(frozen=True)
class Plan:
    """A run to simulate."""

    nodes: int = 1
    """Nodes that train; spares are beside them."""
    spares: int = 0
    min_nodes: int | None = None
    """Fewest nodes with which the run goes on; None: all of them."""
    node_mtbf_s: float = 5000 * HOUR_S
    """Mean time between two faults of one node; times between faults are exponential."""
    node_loss_share: float = 1.0
    """Share of the faults that take the node out of the run until it is repaired."""
    repair_s: float = 24 * HOUR_S
    step_s: float = 1.0
    interval_s: float = 1800.0
    """Time in steps between two checkpoints; infinite: none."""
    checkpoint_s: float = 1.0
    """Time for which training waits at a checkpoint."""
    write_s: float = 0.0
    """Time until a checkpoint is whole, beside training."""
    detect_s: float = 1.0
    restart_s: float = 60.0
    """Time from the decision about a fault to the first step of the new generation."""
    start_s: float = 0.0
    """Time before the first step of the run."""
    memory_share: float = 0.0
    """Share of the faults after which the run goes on from the last step, kept in memory of a living node."""
    overhead_share: float = 0.0
    """Share of the running time that goes into data, evaluation and stragglers."""

    @property
    def mtbf_s(self) -> float:
        """Mean time between two faults of the whole run."""
        return self.node_mtbf_s / self.nodes


@dataclass(frozen=True)
class Fault:
    """A fault of one of the nodes that train."""

    at: float
    """Seconds since the run began."""
    node: int
    lost: bool
    """True if the node is out of the run until it is repaired."""
    in_memory: bool
    """True if the last step survives in memory."""


@dataclass(frozen=True)
class Outcome:
    """Seconds of a simulated run."""

    run_s: float
    useful_s: float
    work_s: float
    """Useful seconds, each counted by the share of nodes that worked in it."""
    lost_s: dict[str, float]
    faults: float

    @property
    def useful_share(self) -> float:
        """Share of the time in steps that counted."""
        return self.useful_s / self.run_s

    @property
    def work_share(self) -> float:
        """Steps that counted, as a share of those of all nodes at work all the time."""
        return self.work_s / self.run_s


def young_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Returns Young's best checkpoint interval (CACM 17(9), 1974): sqrt(2 C M)."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Returns Daly's best checkpoint interval (FGCS 22(3), 2006), of higher order than Young's."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return young_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def draw_faults(plan: Plan, run_s: float, seed: int) -> list[Fault]:
    """Returns faults up to `run_s`, the same for the same seed and nodes, whatever else the plan says."""
    times = random.Random(f"{seed} times")
    rest = random.Random(f"{seed} rest")
    faults, at = [], times.expovariate(1 / plan.mtbf_s)
    while at < run_s:
        node = int(rest.random() * plan.nodes)
        lost, in_memory = rest.random() < plan.node_loss_share, rest.random() < plan.memory_share
        faults.append(Fault(at, node, lost, in_memory and (not lost or plan.nodes > 1)))
        at += times.expovariate(1 / plan.mtbf_s)
    return faults


def simulate(plan: Plan, faults: Sequence[Fault], run_s: float) -> Outcome:
    """Returns what becomes of `run_s` seconds with these faults, in the order of their times."""
    run = _Run(plan)
    for fault in faults:
        if fault.at >= run_s:
            break
        run.until(fault.at)
        run.fail(fault)
    run.until(run_s)
    useful_s = run.done.steps_s * (1 - plan.overhead_share)
    run.lost_s["steps"] += run.done.steps_s - useful_s
    work_s = run.done.work_s * (1 - plan.overhead_share)
    return Outcome(run_s, useful_s, work_s, run.lost_s, run.faults)


def expect(plan: Plan, seed: int = 0) -> Outcome:
    """Returns the mean outcome over several simulated runs, long enough for their share to be stable."""
    run_s = _FAULTS * plan.mtbf_s
    outcomes = [simulate(plan, draw_faults(plan, run_s, seed + at), run_s) for at in range(_REPEATS)]
    return Outcome(
        run_s,
        _mean([outcome.useful_s for outcome in outcomes]),
        _mean([outcome.work_s for outcome in outcomes]),
        {cause: _mean([outcome.lost_s[cause] for outcome in outcomes]) for cause in CAUSES},
        _mean([outcome.faults for outcome in outcomes]),
    )


def best_interval_s(
    plan: Plan, seed: int = 0, expected: Callable[[Plan, int], Outcome] = expect
) -> float | None:
    """Returns the checkpoint interval with the largest simulated share, between half and twice Daly's.

    A parabola through the shares over the logarithm of the interval evens out their noise. None: no fault
    needs a checkpoint on disk, or a checkpoint costs nothing, so that there is no best interval.
    """
    to_disk = 1 - plan.memory_share
    if to_disk <= 0 or plan.checkpoint_s <= 0:
        return None
    center = max(daly_s(plan.checkpoint_s, plan.mtbf_s / to_disk), plan.step_s)
    shares = [expected(replace(plan, interval_s=center * factor), seed).useful_share for factor in _AROUND]
    return center * math.pow(2.0, _peak([math.log2(factor) for factor in _AROUND], shares))


def parse_faults(texts: Sequence[str], plan: Plan) -> list[Fault]:
    """Returns the faults that the texts describe: seconds, or seconds and one of `process`, `node`, `all`.

    `60` and `60:process` leave the node, `60:node` loses one, and after `60:all` no state is left in memory.
    Where the plan keeps none in memory, none is left after any. Raises InputError.
    """
    faults = []
    for number, text in enumerate(text for part in texts for text in part.split(",") if text.strip()):
        at, _, kind = text.strip().partition(":")
        try:
            seconds = float(at)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf or kind not in ("", "process", "node", "all"):
            raise InputError(
                f"fault {text.strip()!r}: give seconds since the begin, such as 60, 60:process, 60:node or "
                "60:all"
            )
        in_memory = plan.memory_share > 0 and kind != "all" and (kind != "node" or plan.nodes > 1)
        faults.append(Fault(seconds, number % plan.nodes, kind == "node", in_memory))
    if not faults:
        raise InputError("--fault-times names no fault: give seconds since the begin, such as 60,130:node")
    return sorted(faults, key=lambda fault: fault.at)


@dataclass
class _Done:
    """Steps that a run has, as their seconds and as work."""

    steps_s: float = 0.0
    work_s: float = 0.0
    part_work_s: float = 0.0
    """Work in the step that is not whole yet; parts of it may have been done on fewer nodes."""


@dataclass
class _Run:
    """A simulated run at one moment."""

    plan: Plan
    now: float = 0.0
    done: _Done = field(default_factory=_Done)
    saved: _Done = field(default_factory=_Done)
    writing: tuple[float, _Done] | None = None
    """Time when the checkpoint that is being written will be whole, and what it holds."""
    since_save: float = 0.0
    """Seconds of running since the last checkpoint or restart; at the end of it training waits for one."""
    outage: deque[tuple[str, float]] = field(default_factory=deque)
    """Causes and seconds for which no step will be done."""
    lost_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    faults: int = 0
    repaired: list[float] = field(default_factory=list)
    """Times at which lost nodes come back, as a heap."""

    def __post_init__(self) -> None:
        self.active, self.spares = self.plan.nodes, self.plan.spares
        self.outage.append(("start", self.plan.start_s))

    @property
    def _fewest(self) -> int:
        return self.plan.nodes if self.plan.min_nodes is None else self.plan.min_nodes

    def until(self, end: float) -> None:
        """Goes on to this time; nodes that are repaired meanwhile come back."""
        while self.repaired and self.repaired[0] <= end:
            self._pass(heapq.heappop(self.repaired))
            self._take_back()
        self._pass(end)

    def fail(self, fault: Fault) -> None:
        """Makes a fault happen now, unless its node is not in the run."""
        if fault.node >= self.active:
            return
        self.faults += 1
        if not self.outage and self.active >= self._fewest:
            self._lose(fault)
        if fault.lost:
            heapq.heappush(self.repaired, self.now + self.plan.repair_s)
            if self.spares:
                self.spares -= 1
            else:
                self.active -= 1
        self._begin_outage(("detection", self.plan.detect_s), ("recovery", self.plan.restart_s))

    def _lose(self, fault: Fault) -> None:
        """Forgets the steps that the ranks cannot go on from."""
        kept = self.saved
        if fault.in_memory:
            cut_off = min(self.done.steps_s, math.fmod(self.done.steps_s, self.plan.step_s))
            kept = _Done(self.done.steps_s - cut_off, self.done.work_s - self.done.part_work_s)
            self.lost_s["redone"] += cut_off
        else:
            self.lost_s["redone"] += self.done.steps_s - kept.steps_s
        self.done = replace(kept)

    def _begin_outage(self, *parts: tuple[str, float]) -> None:
        self.outage = deque(parts)
        self.since_save, self.writing = 0.0, None

    def _take_back(self) -> None:
        """Uses a repaired node: in the place of a lost one by a planned restart, else as a spare."""
        if self.active == self.plan.nodes:
            self.spares += 1
            return
        self.active += 1
        if not self.outage:
            self._begin_outage(("recovery", self.plan.restart_s))

    def _pass(self, end: float) -> None:
        while self.now < end:
            if self.outage:
                self._pass_outage(end)
            elif self.active < self._fewest:
                self.lost_s["nodes"] += end - self.now
                self.now = end
            else:
                self._train(end)

    def _pass_outage(self, end: float) -> None:
        cause, left = self.outage[0]
        if left <= end - self.now:
            self.outage.popleft()
            seconds = left
        else:
            seconds = end - self.now
            self.outage[0] = cause, left - seconds
        self.lost_s[cause] += seconds
        self.now = end if seconds == end - self.now else self.now + seconds

    def _train(self, end: float) -> None:
        """Does steps and saves until then: cycles of an interval and a checkpoint, and a part of one."""
        plan, seconds = self.plan, end - self.now
        cycle = plan.interval_s + plan.checkpoint_s
        whole = self.since_save + seconds
        saves = int(whole // cycle) if math.isfinite(cycle) else 0
        before, rest = min(self.since_save, plan.interval_s), whole - saves * cycle if saves else whole
        gained = (saves * plan.interval_s if saves else 0.0) + min(rest, plan.interval_s) - before
        if self.writing is not None and self.writing[0] <= end:
            self.saved, self.writing = self.writing[1], None
        for number in range(max(1, saves - 1), saves + 1):  # of the others no trace is left
            at = self.now + number * cycle - self.since_save + plan.write_s
            held = self._after(number * plan.interval_s - before)
            if at <= end:
                self.saved, self.writing = held, None
            else:
                self.writing = self.writing or (at, held)
        self.lost_s["checkpoint"] += seconds - gained
        self.done, self.since_save, self.now = self._after(gained), rest, end

    def _after(self, gained: float) -> _Done:
        share, steps_s = self.active / self.plan.nodes, self.done.steps_s + gained
        part_s = math.fmod(steps_s, self.plan.step_s)
        before = self.done.part_work_s if gained < part_s else 0.0
        return _Done(steps_s, self.done.work_s + gained * share, before + min(gained, part_s) * share)


def _peak(places: Sequence[float], values: Sequence[float]) -> float:
    """Returns the place of the top of a parabola through the values, or that of the largest value."""
    largest = places[max(range(len(values)), key=values.__getitem__)]
    # Least squares of a + b x + c x^2; the places lie around 0, so their odd powers add up to nothing.
    n, s2, s4 = len(places), sum(x**2 for x in places), sum(x**4 for x in places)
    y0, y1, y2 = (sum(y * x**power for x, y in zip(places, values, strict=True)) for power in (0, 1, 2))
    b, c = y1 / s2, (n * y2 - s2 * y0) / (n * s4 - s2**2)
    top = -b / (2 * c) if c < 0 else largest
    return top if places[0] <= top <= places[-1] else largest


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
