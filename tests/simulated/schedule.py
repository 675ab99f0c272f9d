"""Schedules: one seed chooses a job, its launcher, and at least two faults; what came of it is checked.

Invariants: never do two generations train at once; no step that was promised is lost; a run trains on or
ends within BOUND_S of simulated seconds after the last fault; the first cause that is named was injected;
exit.json fits what happened; a request to stop always ends the run.
"""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.simulated.loop import SimulatedLoop, Stuck
from tests.simulated.world import Member, Plan, SimulatedWorld
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from trainer.supervise.coordinate.states import Event, State, following

BOUND_S = 120.0
"""Seconds without a new step and without an end, after the last fault, that no run may stand for."""
FOR_EVER_S = 2_000.0
STOPPED_S = 120.0
"""Seconds after a request to stop within which a run must have ended: saving, leaving, and what they wait."""
STEPS_AFTER_STOP = 20
"""Most steps that a run may do after it has heard a request to stop, restarts of its ranks included."""
ONE_EACH = {"kill rank", "fail rank", "kill supervisor", "hang rank"}
"""Faults of which each explains one restart."""


@dataclass(frozen=True)
class Fault:
    """A fault of a schedule: what happens when and where, and for how long."""

    at_s: float
    kind: str
    target: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:.1f} s: {self.kind} {self.target} for {self.lasts_s:.1f} s"


@dataclass
class Outcome:
    """What came of one schedule."""

    seed: int
    plan: Plan
    faults: list[Fault]
    problems: list[tuple[str, str]]
    lines: list[tuple[float, str, str]]
    transitions: set[tuple[str, str]] = field(default_factory=set)
    recovered_s: list[float] = field(default_factory=list)
    simulated_s: float = 0.0


def plan_of(rng: random.Random) -> Plan:
    """Chooses a job of 2 to 64 supervisors, small ones as often as large ones."""
    members = round(exp(rng.uniform(log(2), log(64))))
    per_node = rng.choice([each for each in (1, 2, 4, 8) if each <= members])
    nodes = max(1, members // per_node)
    launcher = rng.choice(["keeps", "keeps", "keeps", "keeps", "lost", "always", "ends"])
    spares = rng.choice([0, 0, 1]) if launcher == "keeps" and nodes > 1 else 0
    min_nodes = rng.choice([None, 1, 1, max(1, nodes - 1)]) if launcher == "keeps" else None
    steps = rng.randrange(30, 80)
    return Plan(nodes, per_node, spares, launcher, rng.choice(["torch", "horovod"]), steps, min_nodes)


def faults_of(rng: random.Random, plan: Plan) -> list[Fault]:
    """Chooses two to five faults, some of them close to one another."""
    count = rng.choice([2, 2, 2, 3, 3, 4, 5])
    members = (plan.nodes + plan.spares) * plan.per_node
    faults, at_s = [], rng.uniform(0.0, 20.0)
    for _ in range(count):
        kind = rng.choice([*FAULTS])
        lasts_s = rng.choice([1.0, 4.0, 9.0, 15.0, 40.0, FOR_EVER_S]) * rng.uniform(0.5, 1.5)
        faults.append(Fault(at_s, kind, rng.randrange(members), lasts_s))
        # Soon after one another they meet a decision, a restart, the end of a silence, a claim.
        soon, later = rng.uniform(0.0, 1.0), rng.uniform(0.0, 4.0)
        at_s += rng.choice([soon, later, rng.uniform(5.5, 10.0), rng.uniform(0.0, 30.0)])
    return sorted(faults, key=lambda fault: fault.at_s)


Undo = Callable[[], object] | None


def _kill_supervisor(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.kill(member)
    return None


def _kill_rank(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if member.rank is not None:
        member.rank.die()
    return None


def _fail_rank(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if member.rank is not None:
        member.rank.fails = (EXIT_FAILED, f"injected failure {fault.at_s:.3f}")
    return None


def _bad_input(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if member.rank is not None:
        member.rank.fails = (EXIT_BAD_INPUT, "injected: no such file")
    return None


def _hang_rank(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if member.rank is not None:
        member.rank.hangs = True
    return None


def _stick_rank(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if (rank := member.rank) is None:
        return None
    rank.is_stuck = rank.hangs = True
    return rank.thaw


def _freeze_rank(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if (rank := member.rank) is None:
        return None
    rank.process.freeze()
    return rank.thaw


def _freeze_supervisor(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if (process := member.process) is None:
        return None
    process.freeze()
    return process.thaw


def _freeze_node(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    on_node = [each for each in world.members if each.node == member.node]
    processes = [each.process for each in on_node if each.process is not None]
    ranks = [each.rank for each in on_node if each.rank is not None]
    for process in [*processes, *(rank.process for rank in ranks)]:
        process.freeze()

    def thaw() -> None:
        for process in processes:
            process.thaw()
        for rank in ranks:
            rank.thaw()

    return thaw


def _power_off(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.network.gone.add(member.node)
    world.kept.pop(member.node, None)
    for each in world.members:
        if each.node == member.node:
            world.kill(each)
    return lambda: world.network.gone.discard(member.node)


def _cut_node(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    others = [node for node in world.nodes if node != member.node]
    pairs = {(member.node, other) for other in others} | {(other, member.node) for other in others}
    return _cut(world, pairs, without_network=member.node if fault.target % 2 else "")


def _cut_one_way(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    return _cut(world, {(member.node, other) for other in world.nodes if other != member.node})


def _cut_in_two(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    nodes = world.nodes
    here = set(nodes[: max(1, nodes.index(member.node))])
    pairs = {(a, b) for a in nodes for b in nodes if (a in here) != (b in here)}
    return _cut(world, pairs)


def _cut(world: SimulatedWorld, pairs: set[tuple[str, str]], without_network: str = "") -> Undo:
    new = pairs - world.network.cut
    world.network.cut |= new
    if without_network:
        world.without_network.add(without_network)

    def heal() -> None:
        world.network.cut -= new
        world.without_network.discard(without_network)

    return heal


def _slow_link(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.network.slow_s[member.node] = min(2.0, 0.2 + fault.lasts_s / 20)
    return lambda: world.network.slow_s.pop(member.node, None)


def _folder_gone(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    where = member.node if fault.target % 2 else ""
    world.folder_gone.add(where)
    return lambda: world.folder_gone.discard(where)


def _folder_slow(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.folder_slow_s = 1.5
    return lambda: setattr(world, "folder_slow_s", 0.0)


def _folder_full(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.folder_full = True
    return lambda: setattr(world, "folder_full", False)


def _no_forks(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.cannot_fork.add(member.node)
    return lambda: world.cannot_fork.discard(member.node)


def _clock_jumps(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.clock_off_s[member.node] += -3600 if fault.target % 2 else 86_400
    return None


def _ask_to_stop(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.asked_to_stop_s = world.asked_to_stop_s or world.loop.time()
    asked = [member] if fault.target % 2 else world.members
    for each in asked:
        if each.process is not None and each.supervisor is not None and each.lives:
            each.process.run(world.hear_stop)
            each.process.run(each.supervisor.on_signal, int(signal.SIGTERM))
    return None


FAULTS: dict[str, Callable[[SimulatedWorld, Member, Fault], Undo]] = {
    "kill supervisor": _kill_supervisor,
    "kill rank": _kill_rank,
    "fail rank": _fail_rank,
    "bad input at rank": _bad_input,
    "hang rank": _hang_rank,
    "rank in an endless system call": _stick_rank,
    "freeze rank": _freeze_rank,
    "freeze supervisor": _freeze_supervisor,
    "freeze node of": _freeze_node,
    "power off node of": _power_off,
    "cut off node of": _cut_node,
    "cut one way from node of": _cut_one_way,
    "cut in two below node of": _cut_in_two,
    "slow link of node of": _slow_link,
    "run folder gone at": _folder_gone,
    "run folder slow at": _folder_slow,
    "run folder full at": _folder_full,
    "no forks on node of": _no_forks,
    "clock jumps on node of": _clock_jumps,
    "ask to stop": _ask_to_stop,
}


class Judge:
    """Checks a world at every change, and at its end."""

    def __init__(self, world: SimulatedWorld, faults: list[Fault]) -> None:
        self._world, self._faults = world, faults
        self._moved_s = world.loop.time()
        self._seen: Any = None

    async def watch(self) -> None:
        """Records that a run stands still, or does not end though it was asked to."""
        world = self._world
        while not world.problems:
            await asyncio.sleep(1.0)
            seen = world.steps.done, len(world.steps.begun), world.generation
            if seen != self._seen:
                self._seen, self._moved_s = seen, world.loop.time()
            if world.is_frozen:
                world.last_fault_s = world.loop.time()
            since_s = max(self._moved_s, world.last_fault_s)
            if world.loop.time() - since_s > BOUND_S:
                world.broken("ends or trains on", f"nothing has happened since {since_s:.1f} s")
            asked_s = world.asked_to_stop_s
            if asked_s is not None and world.loop.time() - max(asked_s, world.last_fault_s) > STOPPED_S:
                world.broken("a stop ends it", f"asked at {asked_s:.1f} s")

    def end(self) -> None:
        """Checks how the run has ended."""
        world = self._world
        if world.problems:
            return
        codes = Counter(member.code for member in world.members)
        ended, is_done = world.ended, world.steps.saved == world.steps.total
        kinds = {fault.kind for fault in self._faults}
        may_lack = kinds & {"run folder gone at", "run folder full at", "power off node of"}
        if ended is None and EXIT_DONE in codes and not may_lack:
            world.broken("exit.json fits", f"there is none, and supervisors left with {dict(codes)}")
        if ended is not None and ended.exit_code == EXIT_DONE and not is_done and not may_lack:
            world.broken("exit.json fits", f"done at step {world.steps.saved} of {world.steps.total}")
        if ended is not None and ended.exit_code == EXIT_PREEMPTED and world.asked_to_stop_s is None:
            world.broken("exit.json fits", "preempted, and nobody had asked")
        heard = world.stop_heard
        if ended is not None and ended.exit_code == EXIT_DONE and heard is not None:
            heard_s, step = heard
            if world.steps.done > step + STEPS_AFTER_STOP and world.last_fault_s <= heard_s:
                world.broken("a stop ends it", f"it was heard at step {step}, and the run was done")
        hit = self._nodes_hit()
        restarts = _restarts(world.folder)
        faults = [row for row in restarts if row["kind"] != "taken in"]
        named = [(row["node"], row["cause"]) for row in faults]
        if ended is not None and ended.exit_code not in (EXIT_DONE, EXIT_PREEMPTED):
            named.append((ended.node, ended.reason))
        if kinds <= ONE_EACH and len(faults) > len(self._faults):
            world.broken("one fault, one restart", f"{len(faults)} after {len(self._faults)}")
        for node, cause in named:
            if node and node not in hit:
                world.broken("the first cause was injected", f"{node}: {cause}")
        for row in () if "power off node of" in kinds else restarts:
            begun = [
                step for number, step in sorted(world.steps.begun.items()) if number >= row["generation"]
            ]
            if begun and begun[0] < row["from_step"]:
                what = f"generation {row['generation']} began from {begun[0]}, not {row['from_step']}"
                world.broken("what was promised is kept", what)

    def _nodes_hit(self) -> set[str]:
        """Returns the nodes that a cause may name: beyond a cut or a freeze each blames the other."""
        members = self._world.members
        wide = {"cut", "freeze", "run", "slow", "ask"} & {fault.kind.split()[0] for fault in self._faults}
        return set(self._world.nodes) if wide else {members[fault.target].node for fault in self._faults}


def run_schedule(seed: int, faults: list[Fault] | None = None) -> Outcome:
    """Plays the schedule of a seed, with other faults where they are given."""
    rng = random.Random(seed)
    random.seed(seed)  # a restart's wait has some jitter
    plan = plan_of(rng)
    chosen = faults_of(rng, plan)
    faults = chosen if faults is None else faults
    loop = SimulatedLoop()
    folder = Path(tempfile.mkdtemp(prefix="clipship-simulated-", dir="/dev/shm"))
    asyncio.set_event_loop(None)
    try:
        world = SimulatedWorld(loop, seed, plan, folder)
        judge = Judge(world, faults)

        async def story() -> None:
            run = loop.create_task(world.run())
            watch = loop.create_task(judge.watch())
            injected = [loop.create_task(_inject(world, fault)) for fault in faults]
            await asyncio.wait([run, watch], return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, *injected):
                task.cancel()
            if run.done():
                run.result()

        def heard(_: Any, told: dict[str, Any]) -> None:
            if error := told.get("exception"):
                world.broken("no error", f"{type(error).__name__}: {error}")

        loop.set_exception_handler(heard)
        try:
            with patch("trainer.supervise.coordinate.run_state.following", _watched(world.transitions)):
                loop.run_until_complete(story())
        except Stuck as error:
            world.broken("ends or trains on", str(error))
        judge.end()
        recovered = [row["seconds"] for row in _restarts(folder) if row["seconds"] is not None]
        return Outcome(
            seed, plan, faults, world.problems, world.lines, world.transitions, recovered, loop.time()
        )
    finally:
        loop.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _inject(world: SimulatedWorld, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    undo = FAULTS[fault.kind](world, world.members[fault.target], fault)
    world.last_fault_s = max(world.last_fault_s, world.loop.time())
    if undo is not None:
        await asyncio.sleep(fault.lasts_s)
        undo()
        world.last_fault_s = max(world.last_fault_s, world.loop.time())


def _watched(seen: set[tuple[str, str]]) -> Callable[[State, Event], State]:
    def watched(state: State, event: Event) -> State:
        seen.add((state.name, event.name))
        return following(state, event)

    return watched


def _restarts(folder: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        rows: list[dict[str, Any]] = json.loads((folder / "restarts.json").read_text())["restarts"]
        return rows
    return []
