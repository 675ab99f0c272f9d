"""Schedules: one seed chooses a job, its launcher, and at least two faults; what came of it is checked.

Invariants: never do two generations train at once; no rank outlives the fence; of two parts of a network the
larger one goes on; no message about an earlier generation has an effect; no step that was promised is lost; a
fault's step and the seconds of its restart are the true ones; a run trains on or ends within BOUND_S of
simulated seconds after the last fault, and is done if it can go on; the first cause that is named was
injected; exit.json fits what happened; a request to stop always ends the run; no work and no timer is left
over from a recovery.

Faults come soon after one another, or as soon as the coordinator comes to a state: what comes while another
fault is dealt with finds most.
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

from tests.simulated.loop import BEGAN_S, SimulatedLoop, Stuck
from tests.simulated.world import EPOCH_S, LIMITS, Member, Plan, SimulatedWorld
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.coordinate.coordinator_host import REJOIN_FACTOR, REJOIN_S
from trainer.supervise.coordinate.presence import FENCE_S, REGROUP_S, smaller_waits_s
from trainer.supervise.coordinate.relaunch import KILLED_TOGETHER
from trainer.supervise.coordinate.report_collection import ANSWER_S
from trainer.supervise.coordinate.states import BETWEEN, Event, State, following
from trainer.supervise.messages import AboutRank, Message
from trainer.supervise.rank.rank_report import STACK_WAIT_S
from trainer.world.restart_policy import CUT_OFF

PHASES = ("DECIDING", "ENDING", "AGREEING", "CLAIMED", "STARTING", "RUNNING")
SUCCEEDS_S = (1.0 + REJOIN_FACTOR) * LIMITS.silence_s + REJOIN_S
"""Seconds until a coordinator that falls silent has a successor."""
BOUND_S = SUCCEEDS_S + REGROUP_S + smaller_waits_s(LIMITS.silence_s) + LIMITS.init_s
"""Seconds without a new step and without an end, after the last fault, that no run may stand for: the waits
that may follow one another."""
ASKS_S, COMES_BACK_S = 2 * LIMITS.init_s, CUT_OFF.first_s + LIMITS.init_s
"""Seconds more where a successor asks a run folder that does not answer, which it does three times, and where
a supervisor that has left by itself is started again, and may find nobody."""
STOPPED_S = SUCCEEDS_S + LIMITS.checkpoint_s + LIMITS.shutdown_s + ANSWER_S + STACK_WAIT_S + 1.0
"""Seconds after a request to stop, or a later fault, within which a run must have ended."""
FOR_EVER_S = 2_000.0
STEPS_AFTER_STOP = 20
"""Most steps that a run may do after it has heard a request to stop, restarts of its ranks included."""
LEADER = -1
PHASE_S = 25.0
"""Seconds for which a fault waits for its phase."""
STEADY_S, LEFT_S = 6.0, (6.0, smaller_waits_s(LIMITS.silence_s) + 6.0)
"""Seconds of training after a fault or a restart, and seconds after those, when nothing of it may be left.

The smaller part of a network that was cut in two waits longer until it claims a generation, and then leaves.
"""
ONE_EACH = {"kill rank", "fail rank", "kill supervisor", "hang rank"}
"""Faults of which each explains one restart."""
SELDOM = (
    ("kill rank", "kill supervisor", "ENDING"),
    ("rank in an endless system call", "cut off node of", "ENDING"),
    ("kill rank", "ask to stop", ""),
    ("ask to stop", "kill supervisor", ""),
    ("kill rank", "power off node of", "CLAIMED"),
)
"""Faults, another one soon after each, and its phase, that seldom meet by chance."""


@dataclass(frozen=True)
class Fault:
    """A fault of a schedule: what happens when and where, and for how long."""

    after_s: float
    """Seconds since the fault before, or since the coordinator came to `phase` after that."""
    kind: str
    target: int
    """Number of a supervisor; LEADER: the one that is the coordinator then."""
    lasts_s: float
    phase: str = ""

    def __str__(self) -> str:
        since, target = self.phase or "the one before", self.target if self.target >= 0 else "the coordinator"
        return f"{self.after_s:.2f} s after {since}: {self.kind} {target} for {self.lasts_s:.1f} s"


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
    sent: tuple[int, int] = (0, 0)
    """Messages and bytes of all supervisors together."""


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
    faults: list[Fault] = []
    for number in range(count):
        kind = rng.choice([*FAULTS])
        lasts_s = rng.choice([1.0, 4.0, 9.0, 15.0, 40.0, FOR_EVER_S]) * rng.uniform(0.5, 1.5)
        near = faults[-1].target if faults else 0
        anyone = rng.randrange(members)
        target = rng.choice([anyone, anyone, anyone, LEADER, near, (near + 1) % members])
        # Soon after one another they meet a decision, a restart, the end of a silence, a claim.
        phase = rng.choice([*PHASES]) if number and rng.random() < 0.5 else ""
        soon, later = rng.uniform(0.0, 1.0), rng.uniform(0.0, 4.0)
        after_s = rng.choice([soon, later, rng.uniform(5.5, 10.0), rng.uniform(0.0, 30.0)])
        if phase:
            after_s = rng.choice([0.0, rng.uniform(0.0, 0.05), soon])
        faults.append(Fault(after_s if number else rng.uniform(0.0, 20.0), kind, target, lasts_s, phase))
    return _seldom(rng, members) if rng.random() < 0.05 else faults


def _seldom(rng: random.Random, members: int) -> list[Fault]:
    first, second, phase = rng.choice(SELDOM)
    target, lasts_s = rng.randrange(members), FOR_EVER_S * rng.uniform(0.5, 1.5)
    soon_s = rng.choice([0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, 0.5)])
    return [
        Fault(rng.uniform(3.0, 15.0), first, target, lasts_s),
        Fault(soon_s, second, rng.choice([target, LEADER]), lasts_s, phase),
    ]


Undo = Callable[[], object] | None


def _kill_supervisor(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.kill(member)
    return None


def _kill_all_on_node(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    for each in world.members:
        if each.node == member.node:
            world.kill(each)
    return None


def _kill_rank(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if member.rank is not None:
        member.rank.die()
    return None


def _fail_rank(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    if member.rank is not None:
        member.rank.fails = (EXIT_FAILED, f"injected failure {fault.lasts_s:.3f}")
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
    return _cut(world, pairs, without_network=member.node if round(10 * fault.lasts_s) % 2 else "")


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
    here, now = world.starter.node, world.loop.time()
    off = {a if b == here else b for a, b in new if here in (a, b)} - world.cut_off.keys()
    world.cut_off.update(dict.fromkeys(off, now))
    if without_network:
        world.without_network.add(without_network)

    def heal() -> None:
        world.network.cut -= new
        for node in off:
            world.cut_off.pop(node, None)
        world.without_network.discard(without_network)

    return heal


def _slow_link(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.network.slow_s[member.node] = min(2.0, 0.2 + fault.lasts_s / 20)
    return lambda: world.network.slow_s.pop(member.node, None)


def _folder_gone(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    where = member.node if member.number % 2 else ""
    world.folder_gone.add(where)
    world.folder_gone_s += fault.lasts_s
    return lambda: world.folder_gone.discard(where)


def _folder_slow(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.folder_slow_s = 1.5
    return lambda: setattr(world, "folder_slow_s", 0.0)


def _folder_full(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.folder_full = True
    world.folder_gone_s += fault.lasts_s
    return lambda: setattr(world, "folder_full", False)


def _no_forks(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.cannot_fork.add(member.node)
    return lambda: world.cannot_fork.discard(member.node)


def _clock_jumps(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.clock_off_s[member.node] += -3600 if member.number % 2 else 86_400
    return None


def _ask_to_stop(world: SimulatedWorld, member: Member, fault: Fault) -> Undo:
    world.asked_to_stop_s = world.asked_to_stop_s or world.loop.time()
    asked = [member] if member.number % 2 else world.members
    world.are_all_asked = world.are_all_asked or asked is world.members
    for each in asked:
        if each.process is not None and each.supervisor is not None and each.lives:
            each.process.run(world.hear_stop)
            each.process.run(each.supervisor.on_signal, int(signal.SIGTERM))
    return None


FAULTS: dict[str, Callable[[SimulatedWorld, Member, Fault], Undo]] = {
    "kill supervisor": _kill_supervisor,
    "kill all on node of": _kill_all_on_node,
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

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._moved_s = world.loop.time()
        self._left_s: dict[str, float] = {}
        """Work that should not be there, by its name, and since when it is."""
        self._seen: Any = None

    async def watch(self) -> None:
        """Records that a run stands still, or does not end though it was asked to."""
        world = self._world
        while not world.problems:
            await asyncio.sleep(1.0)
            self._look_at_ranks()
            self._look_at_work()
            seen = world.steps.done, len(world.steps.begun), world.generation
            if seen != self._seen:
                self._seen, self._moved_s = seen, world.loop.time()
            if world.is_frozen:
                world.record_change()
            since_s = max(self._moved_s, world.last_fault_s)
            asks_s = ASKS_S if world.folder_gone_s > world.limits.init_s else 0.0
            bound_s = BOUND_S + asks_s + (COMES_BACK_S if world.has_left else 0.0)
            if world.loop.time() - since_s > bound_s:
                world.broken("ends or trains on", f"nothing has happened since {since_s:.1f} s")
            asked_s = world.asked_to_stop_s
            if (
                asked_s is not None
                and world.loop.time() - max(asked_s, world.last_fault_s) > STOPPED_S + asks_s
            ):
                world.broken("a stop ends it", f"asked at {asked_s:.1f} s")

    def _look_at_ranks(self) -> None:
        """Finds a rank that lives beyond a cut for longer than the others wait until they go on."""
        world, now = self._world, self._world.loop.time()
        for rank in world.ranks if world.plan.launcher == "keeps" else ():
            since_s = world.cut_off.get(rank.node)
            if since_s is None or rank.begun_s > since_s or not rank.has_met or rank.is_stuck:
                continue
            cut_s = now - max(since_s, world.last_fault_s)
            if rank.process.at_work and cut_s > world.limits.silence_s + FENCE_S + 1.0:
                world.broken("no rank outlives the fence", f"one of generation {rank.number} on {rank.node}")

    def _look_at_work(self) -> None:
        """Finds work and timers that a recovery has left behind."""
        world, now = self._world, self._world.loop.time()
        last_s = max([world.last_fault_s, *world.steps.begun_s.values()])
        trains = (
            world.steps.log and now - world.steps.log[-1][0] < 2.0 and world.steps.saved < world.steps.total
        )
        if world.at_fault or world.asked_to_stop_s or not trains or now - last_s < STEADY_S:
            self._left_s = {}
            return
        living = [each.process for each in world.members if each.process and each.lives]
        work = Counter(
            task.get_coro().__qualname__.split(".")[-1]  # type: ignore[union-attr]
            for process in living
            for task in process.tasks
            if not task.done()
        )
        left = {name: number for name, number in work.items() if number > self._most(name, len(living))}
        if world.loop.timers > 20 + 8 * len(living):
            left["timers"] = world.loop.timers
        self._left_s = {name: self._left_s.get(name, now) for name in left}
        for name, since_s in self._left_s.items():
            if now - since_s > LEFT_S[name in {"_decide", "_rejoin", "_restart", "take_over"}]:
                world.broken("nothing is left of a recovery", f"{left} in {len(living)} supervisors")

    def _most(self, name: str, living: int) -> int:
        return living if name in {"life", "_send_heartbeats", "_receive_from_parent", "_serve"} else 0

    def end(self) -> None:
        """Checks how the run has ended."""
        world = self._world
        if world.problems:
            return
        codes = Counter(member.code for member in world.members)
        ended, is_done = world.ended, world.steps.saved == world.steps.total
        kinds = {kind for kind, _, _ in world.hit}
        restarts = _restarts(world.folder)
        may_lack = bool(kinds & {"run folder gone at", "run folder full at"})
        # One that was taken for lost may have a claim, and lose its power.
        others = {kind.split()[0] for kind in kinds}
        off = {node for kind, node, _ in world.hit if kind == "power off node of"}
        may_lack = may_lack or off >= {*world.nodes} or bool(off and others & {"cut", "freeze", "slow"})
        if ended is None and EXIT_DONE in codes and not may_lack:
            world.broken("exit.json fits", f"there is none, and supervisors left with {dict(codes)}")
        # A launcher ends a smaller part that goes on, since most have left: one that hears all, and whom
        # nobody hears, takes the others for dead; and parts that were lost one after the other add up.
        parts = sum(kind.split()[0] in {"cut", "freeze"} for kind, _, _ in world.hit)
        may_lack = may_lack or (-9 in codes and ("cut one way from node of" in kinds or parts > 1))
        if ended is None and not may_lack and world.plan.launcher == "keeps" and codes.keys() - {-9}:
            world.broken("exit.json fits", f"there is none, and supervisors left with {dict(codes)}")
        if ended is not None and ended.exit_code == EXIT_DONE and not is_done and not may_lack:
            world.broken("exit.json fits", f"done at step {world.steps.saved} of {world.steps.total}")
        if ended is not None and ended.exit_code == EXIT_PREEMPTED and world.asked_to_stop_s is None:
            world.broken("exit.json fits", "preempted, and nobody had asked")
        self._check_stop(ended, restarts)
        self._check_going_on(ended, kinds)
        heard = world.stop_heard
        if ended is not None and ended.exit_code == EXIT_DONE and heard is not None:
            heard_s, step = heard
            # Signals soon after a fault may be MPI's own, which then ends all.
            others_s = [at for kind, _, at in world.hit if kind != "ask to stop"]
            may_be_mpi = world.plan.launcher != "keeps" and heard_s - max(others_s, default=0.0) < 10.0
            too_many = world.steps.done > step + STEPS_AFTER_STOP
            # Each supervisor that lives knows of it, whatever became of the coordinator.
            is_known = world.are_all_asked and kinds <= ONE_EACH | {"ask to stop"}
            if too_many and not may_be_mpi and (is_known or world.last_fault_s <= heard_s):
                world.broken("a stop ends it", f"it was heard at step {step}, and the run was done")
        waited = [line for _, _, line in world.lines if "takes no claim of generation" in line]
        if waited and world.folder_gone_s < world.limits.init_s - 5.0:
            world.broken("the run folder has its time", f"{world.folder_gone_s:.1f} s, and {waited[0]}")
        hit = self._nodes_hit()
        faults = [row for row in restarts if row["kind"] != "taken in"]
        named = [(row["node"], row["cause"]) for row in faults]
        if ended is not None and ended.exit_code not in (EXIT_DONE, EXIT_PREEMPTED):
            named.append((ended.node, ended.reason))
        if kinds <= ONE_EACH and len(faults) > len(world.hit):
            world.broken("one fault, one restart", f"{len(faults)} after {len(world.hit)}")
        for node, cause in named:
            if node and node not in hit:
                world.broken("the first cause was injected", f"{node}: {cause}")
        for row in () if "clock jumps on node of" in kinds else restarts:
            self._check_times(row)
        for row in () if "power off node of" in kinds else restarts:
            begun = [
                step for number, step in sorted(world.steps.begun.items()) if number >= row["generation"]
            ]
            if begun and begun[0] < row["from_step"]:
                what = f"generation {row['generation']} began from {begun[0]}, not {row['from_step']}"
                world.broken("what was promised is kept", what)

    def _check_going_on(self, ended: ExitRecord | None, kinds: set[str]) -> None:
        """Checks that a run is done after faults of which each costs no more than a restart."""
        world = self._world
        faults = ONE_EACH - {"hang rank"} - ({"kill supervisor"} if world.plan.launcher == "ends" else set())
        had_trained = world.hit and world.steps.log and world.steps.log[0][0] < world.hit[0][2]
        some_are_left = len(world.hit) < len(world.members)
        is_done = ended is not None and ended.exit_code == EXIT_DONE
        if kinds <= faults and had_trained and some_are_left and not is_done:
            how = "" if ended is None else f", with {ended.exit_code}: {ended.reason}"
            world.broken("a run that can go on does", f"it has ended{how}")

    def check_start(self) -> None:
        """Checks, when a generation starts, that it is not the smaller part of a network cut once."""
        world, plan = self._world, self._world.plan
        if len(world.hit) != 1 or not world.hit[0][0].startswith("cut") or plan.launcher != "keeps":
            return
        network, here = world.network, world.leader.node
        living = [each for each in world.members if each.lives]
        beyond = [
            each for each in living if network.is_cut(here, each.node) or network.is_cut(each.node, here)
        ]
        least = (plan.nodes if plan.min_nodes is None else plan.min_nodes) * plan.per_node
        if len(beyond) >= max(least, len(living) - len(beyond) + 1):
            world.broken("the larger part goes on", f"{len(beyond)} of {len(living)} are beyond the cut")

    def _check_stop(self, ended: ExitRecord | None, restarts: list[dict[str, Any]]) -> None:
        """Checks what came of a request to stop that the coordinator heard, and after which no fault came."""
        world = self._world
        if world.obeyed_s is None or ended is None or world.plan.launcher != "keeps":
            return
        late = {n: at for n, at in world.steps.begun_s.items() if at > world.obeyed_s + 1.0}
        if late and world.obeyed_in in BETWEEN:
            world.broken("a stop ends it", f"the coordinator heard it at {world.obeyed_s:.2f} s: {late}")
        kinds = {kind for kind, _, _ in world.hit} - {"ask to stop"}
        helps = world.steps.done and kinds <= ONE_EACH - {"hang rank"}
        may_fail = ended.exit_code in (EXIT_DONE, EXIT_PREEMPTED) or "in checkpoint" in ended.reason
        if helps and not may_fail:
            world.broken("a stop ends it", f"with exit code {ended.exit_code}: {ended.reason}")
        from_step = restarts[-1]["from_step"] if restarts else 0
        can_save = kinds <= ONE_EACH - {"hang rank"}  # all ranks save together
        if can_save and world.obeyed_in is State.STARTING and world.steps.saved < from_step:
            what = f"step {from_step} was in memory, and {world.steps.saved} is saved"
            world.broken("a stop saves what there is", what)

    def _check_times(self, row: dict[str, Any]) -> None:
        """Checks the step at which a restart was made, and the seconds that it is said to have taken."""
        world, number = self._world, row["generation"]
        before = [(at, step) for at, generation, step in world.steps.log if generation < number]
        reached = max((step for _, step in before), default=0)
        new_s = [at for at, generation, step in world.steps.log if generation >= number and step > reached]
        fault_s = row["time"] - EPOCH_S
        then = max((step for at, step in before if at <= fault_s + 0.6), default=0)
        # Where a supervisor cannot write, ranks go on until the launcher ends them. If all were killed at
        # once, or a node has lost its memory, only what was saved is known.
        kinds = {kind for kind, _, _ in world.hit}
        is_unknown = row["cause"] == KILLED_TOGETHER or "power off node of" in kinds
        least = row["from_step"] if is_unknown else then - 2
        may_be = least <= row["step"] <= reached + 2
        if row["kind"] == "lost" and world.plan.launcher != "keeps" and not may_be:
            world.broken("the step of a fault", f"generation {number}: {row['step']}, and {then} were done")
        told_late = {"freeze", "run", "slow", "cut"} & {kind.split()[0] for kind in kinds}
        if told_late or is_unknown or row["seconds"] is None or not new_s:
            return
        true_s = new_s[0] - fault_s
        if abs(row["seconds"] - true_s) > 2.5:
            world.broken("the seconds of a restart", f"{row['seconds']}, and it has taken {true_s:.1f} s")

    def _nodes_hit(self) -> set[str]:
        """Returns the nodes that a cause may name: beyond a cut or a freeze each blames the other."""
        wide = {"cut", "freeze", "run", "slow", "ask"} & {kind.split()[0] for kind, _, _ in self._world.hit}
        return set(self._world.nodes) if wide else {node for _, node, _ in self._world.hit}


def run_schedule(seed: int, faults: list[Fault] | None = None, plan: Plan | None = None) -> Outcome:
    """Plays the schedule of a seed, with other faults or another job where they are given."""
    rng = random.Random(seed)
    random.seed(seed)  # a restart's wait has some jitter
    plan = plan or plan_of(rng)
    chosen = faults_of(rng, plan)
    faults = chosen if faults is None else faults
    loop = SimulatedLoop()
    folder = Path(tempfile.mkdtemp(prefix="clipship-simulated-", dir="/dev/shm"))
    asyncio.set_event_loop(None)
    try:
        world = SimulatedWorld(loop, seed, plan, folder)
        judge = Judge(world)

        async def story() -> None:
            run = loop.create_task(world.run())
            watch = loop.create_task(judge.watch())
            injected = loop.create_task(_inject(world, faults))
            await asyncio.wait([run, watch], return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, injected):
                task.cancel()
            if run.done():
                run.result()

        def heard(_: Any, told: dict[str, Any]) -> None:
            if error := told.get("exception"):
                world.broken("no error", f"{type(error).__name__}: {error}")

        loop.set_exception_handler(heard)
        try:
            following = patch("trainer.supervise.coordinate.run_state.following", _watched(world, judge))
            with following, patch.object(Coordinator, "receive", _heard(world)):
                loop.run_until_complete(story())
        except Stuck as error:
            world.broken("ends or trains on", str(error))
        judge.end()
        its = world.problems, world.lines, world.transitions, world.recovered_s()
        sent = world.network.messages, world.network.bytes
        return Outcome(seed, plan, faults, *its, loop.time() - BEGAN_S, sent)
    finally:
        loop.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _inject(world: SimulatedWorld, faults: list[Fault]) -> None:
    for fault in faults:
        if fault.phase:
            await world.phase(fault.phase, PHASE_S)
        await asyncio.sleep(fault.after_s)
        member = world.members[fault.target] if fault.target >= 0 else world.leader
        world.hit.append((fault.kind, member.node, world.loop.time()))
        undo = FAULTS[fault.kind](world, member, fault)
        world.record_change()
        if fault.kind != "ask to stop":
            world.obeyed_s = None
        if undo is not None:
            world.at_fault += 1
            world.loop.call_later(fault.lasts_s, _undo, world, undo)


def _undo(world: SimulatedWorld, undo: Callable[[], object]) -> None:
    undo()
    world.at_fault -= 1
    world.record_change()


def _watched(world: SimulatedWorld, judge: Judge) -> Callable[[State, Event], State]:
    def watched(state: State, event: Event) -> State:
        world.transitions.add((state.name, event.name))
        world.enter(new := following(state, event))
        if event is Event.START:
            judge.check_start()
        return new

    return watched


def _heard(world: SimulatedWorld) -> Callable[[Coordinator, Message], None]:
    """Returns `Coordinator.receive`, which finds what a message about an earlier generation changes."""
    receive = Coordinator.receive

    def heard(coordinator: Coordinator, message: Message) -> None:
        its = coordinator._run.generation
        is_old = isinstance(message, AboutRank) and message.generation < its.number
        before = (coordinator.state, repr(its)) if is_old else None
        receive(coordinator, message)
        if is_old and before != (coordinator.state, repr(coordinator._run.generation)):
            world.broken("no old message has an effect", repr(message))

    return heard


def _restarts(folder: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        rows: list[dict[str, Any]] = json.loads((folder / "restarts.json").read_text())["restarts"]
        return rows
    return []
