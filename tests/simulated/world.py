"""The simulated world: nodes, supervisors, their launcher, the run folder."""

import asyncio
import errno
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tests.simulated.loop import Process, SimulatedLoop
from tests.simulated.network import Network
from tests.simulated.ranks import SimulatedRank, Steps, Training
from trainer.errors import EXIT_FAILED
from trainer.launch.start_again import asked_after
from trainer.run.exit_files import exit_record_of
from trainer.run.exit_record import ExitRecord
from trainer.run.file_work import FileWork
from trainer.run.launcher_word import WORD
from trainer.supervise.coordinate.states import State
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine
from trainer.supervise.network.tree_plan import Address
from trainer.supervise.supervisor import Supervisor, start_first_rank
from trainer.world.launchers import World
from trainer.world.lease import POLL_S
from trainer.world.rendezvous import Rendezvous
from trainer.world.restart_policy import LEAVE_S, RespawnPolicy
from trainer.world.variables import (
    GENERATION,
    KEEPS_GOING,
    RESPAWNED,
    RESPAWNS,
    SPARE_NODES,
    STARTS_AGAIN,
)

Result = TypeVar("Result")
EPOCH_S = 1_700_000_000.0
LIMITS = Limits(init_s=30.0, checkpoint_s=60.0, shutdown_s=20.0, silence_s=6.0, max_restarts=5, backoff_s=1.0)
GRACE_S = 0.5
"""Seconds that MPI leaves the others when one is gone."""


@dataclass(frozen=True)
class Plan:
    """What a schedule begins with."""

    nodes: int
    per_node: int
    spares: int
    launcher: str
    """keeps: keeps the others and starts a lost supervisor again; lost, always: starts all again, see
    STARTS_AGAIN; ends: ends all when one is gone."""
    backend: str
    steps: int
    min_nodes: int | None


class SimulatedFiles(FileWork):
    """Work with the run folder on one node: slow at times, and at times without an answer."""

    def __init__(self, world: "SimulatedWorld", node: str) -> None:
        super().__init__()
        self._world, self._node = world, node

    def prepare(self) -> None:
        pass

    def do(self, work: Callable[[], None]) -> None:
        pass  # only messages to people are sent so

    async def answered(self, seconds: float, work: Callable[[], Result]) -> Result:
        world = self._world
        delay_s = world.rng.uniform(0.0005, 0.02) + world.folder_slow_s
        await asyncio.sleep(min(delay_s, seconds))
        if delay_s >= seconds or world.lacks_folder(self._node):
            if delay_s < seconds:
                await asyncio.sleep(seconds - delay_s)
            raise TimeoutError("the run folder does not answer")
        return work()


class SimulatedMachine(Machine):
    """Machine of one supervisor in the simulated world."""

    def __init__(self, world: "SimulatedWorld", node: str, process: Process) -> None:
        self._world, self._node, self._process = world, node, process
        self.files = SimulatedFiles(world, node)

    def wall_time(self) -> float:
        return self._world.wall_time(self._node)

    def say(self, line: str) -> None:
        self._world.told(self._node, line)

    async def connect(self, address: Address) -> Any:
        return await self._world.network.connect(self._process, self._node, address)

    async def listen(self, accept: Any, host: str | None, port: int) -> Any:
        return self._world.network.listen(self._process, self._node, port, accept)

    async def listening_address(self, host: str) -> str | None:
        return host

    def has_route(self, writer: Any) -> bool:
        is_here = writer.get_extra_info("peername")[0] == self._node  # no network lies between
        return is_here or self._node not in self._world.without_network

    async def fresh_variables(self, env: Mapping[str, str], address: str) -> dict[str, str]:
        self._world.port += 1
        return {"MASTER_PORT": str(self._world.port)}

    def newest_kept(self, env: Mapping[str, str]) -> int:
        return self._world.kept.get(self._node, 0)

    async def ras_status(self) -> str:
        return ""


class Member:
    """One supervisor, which may be started several times."""

    def __init__(self, number: int, node: str) -> None:
        self.number, self.node = number, node
        self.process: Process | None = None
        self.supervisor: Supervisor | None = None
        self.rank: SimulatedRank | None = None
        self.code: int | None = None
        """Exit code of its process, -9 if it was killed; None while it runs."""
        self.began_s = 0.0

    @property
    def lives(self) -> bool:
        """True while its process runs, or could."""
        return self.process is not None and not self.process.is_dead


class SimulatedWorld:
    """All of one schedule; `run` lets the job go its way."""

    def __init__(self, loop: SimulatedLoop, seed: int, plan: Plan, folder: Path) -> None:
        self.loop, self.rng, self.plan, self.folder = loop, random.Random(seed), plan, folder
        self.network = Network(loop, self.rng)
        self.backend, self.steps = plan.backend, Steps(plan.steps)
        self.kept: dict[str, int] = {}
        self.ranks: list[SimulatedRank] = []
        self.clock_off_s: Counter[str] = Counter()
        self.folder_gone: set[str] = set()
        """Nodes whose run folder does not answer; "" stands for all."""
        self.folder_full = False
        self.folder_gone_s = 0.0
        """Seconds for which the run folder does not answer, all such faults together."""
        self.folder_slow_s = 0.0
        self.without_network: set[str] = set()
        self.cannot_fork: set[str] = set()
        self.port = 1
        self.lines: list[tuple[float, str, str]] = []
        self.problems: list[tuple[str, str]] = []
        self.transitions: set[tuple[str, str]] = set()
        self.members = [Member(number, f"n{number // plan.per_node}") for number in range(self._size)]
        self.has_left = False
        """True once the launcher has seen a supervisor leave by itself."""
        self.are_all_asked = False
        """True once all supervisors were asked to stop at once."""
        self.asked_to_stop_s: float | None = None
        self.stop_heard: tuple[float, int] | None = None
        """When a supervisor first heard a request to stop, and the step that was done by then."""
        self.obeyed_s: float | None = None
        """When the coordinator heard one; None also if a fault came later, which may let others go on."""
        self.obeyed_in = State.STARTING
        """State in which that was."""
        self._changes_s = [loop.time()]
        self.at_fault = 0
        """Faults that last at present."""
        self.state = State.STARTING
        """State to which a coordinator has come last."""
        self.leading: Process | None = None
        """Process of the coordinator that has come to another state last."""
        self.started_by: Process | None = None
        """Process of the coordinator that has started a generation last; None: the launcher has."""
        self.cut_off: dict[str, float] = {}
        """Nodes that do not hear the coordinator's node, or are not heard there, and since when."""
        self.hit: list[tuple[str, str, float]] = []
        """Kind, node and time of each fault so far."""
        self._phases: dict[str, list[asyncio.Future[None]]] = {}
        self.ended: ExitRecord | None = None
        self.generation = 1
        self._trainings: dict[tuple[int, str], Training] = {}
        self._changed = asyncio.Event()
        self.rendezvous = Rendezvous("n0", 1, secrets.token_hex(8))
        sizes = tuple(range(1, self._size + 1))
        self.limits = replace(
            LIMITS, run_folder=str(folder), min_nodes=plan.min_nodes, world_sizes=sizes, run="simulated"
        )

    @property
    def _size(self) -> int:
        return (self.plan.nodes + self.plan.spares) * self.plan.per_node

    @property
    def nodes(self) -> list[str]:
        return sorted({member.node for member in self.members})

    def told(self, node: str, line: str) -> None:
        self.lines.append((self.loop.time(), node, line))
        if "its supervisor failed: " in line:
            self.broken("no error", line)

    def wall_time(self, node: str) -> float:
        return EPOCH_S + self.loop.time() + self.clock_off_s[node]

    def broken(self, invariant: str, what: str) -> None:
        self.problems.append((invariant, f"{what} (at {self.loop.time():.2f} s)"))
        self._changed.set()

    @property
    def is_frozen(self) -> bool:
        """True while no supervisor that lives can do anything."""
        living = [each.process for each in self.members if each.process and each.lives]
        return bool(living) and all(process.is_frozen for process in living)

    @property
    def last_fault_s(self) -> float:
        """Time at which a fault has come or gone, or everything was frozen, last."""
        return self._changes_s[-1]

    def record_change(self) -> None:
        self._changes_s.append(self.loop.time())

    def recovered_s(self) -> list[float]:
        """Returns how long nothing new was done before each generation, since a fault came or went."""
        found, newest, reached, reached_s = list[float](), 1, 0, 0.0
        for at, generation, step in self.steps.log:
            if step > reached:
                if generation > newest:
                    changed_s = max(each for each in self._changes_s if each <= at)
                    found.append(round(at - max(changed_s, reached_s), 1))
                newest, reached, reached_s = max(newest, generation), step, at
        return found

    def hear_stop(self) -> None:
        self.stop_heard = self.stop_heard or (self.loop.time(), self.steps.done)
        if Process.running() is self.leading and self.at_fault == 0 and self.obeyed_s is None:
            self.obeyed_s, self.obeyed_in = self.loop.time(), self.state

    @property
    def leader(self) -> Member:
        """Supervisor of the coordinator, or of the last one."""
        return next((each for each in self.members if each.process is self.leading), self.members[0])

    @property
    def starter(self) -> Member:
        """Supervisor whose coordinator has started the present generation, or that leads now."""
        return next(
            (each for each in self.members if each.process is self.started_by and each.lives), self.leader
        )

    def enter(self, state: State) -> None:
        """Takes note that a coordinator has come to a state."""
        self.leading, self.state = Process.running(), state
        if state is State.STARTING:
            self.started_by = self.leading
        for waiting in self._phases.pop(state.name, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def phase(self, name: str, limit_s: float) -> None:
        """Waits until a coordinator comes to that state, but not longer than the limit."""
        entered = self.loop.create_future()
        self._phases.setdefault(name, []).append(entered)
        await asyncio.wait([entered], timeout=limit_s)

    def lacks_folder(self, node: str) -> bool:
        """Returns whether the run folder does not answer on a node."""
        return not self.folder_gone.isdisjoint({node, ""})

    async def reach_folder(self, node: str) -> None:
        await asyncio.sleep(self.folder_slow_s)
        while self.lacks_folder(node):
            await asyncio.sleep(0.5)

    def check_folder(self, node: str) -> None:
        if self.lacks_folder(node):
            raise OSError(errno.ESTALE, "Stale file handle")
        if self.folder_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def training(self, generation: int, port: str, size: int) -> Training:
        return self._trainings.setdefault((generation, port), Training(self, generation, size))

    # Supervisors and their launcher.

    def begin(self, member: Member, *, again: int = 0) -> None:
        """Starts a supervisor; `again`: in the place of a lost one."""
        plan, per_node = self.plan, self.plan.per_node
        local_rank, launcher = member.number % per_node, "clipship run"
        world = World(member.number, self._size, local_rank, per_node, member.node, launcher, self.generation)
        keeps = {KEEPS_GOING: "1", RESPAWNS: "1", SPARE_NODES: str(plan.spares)}
        told = {"keeps": keeps, "ends": {}}.get(plan.launcher, {STARTS_AGAIN: plan.launcher})
        env = {
            **self.rendezvous.variables(),
            **told,
            **({RESPAWNED: str(again)} if again else {}),
            GENERATION: str(self.generation),
            "CLIPSHIP_STARTED_HERE": "1",
            "RANK": str(member.number),
            "WORLD_SIZE": str(self._size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": self.rendezvous.host,
            "MASTER_PORT": str(self.port),
        }
        member.code, member.rank, member.began_s = None, None, self.loop.time()
        member.process = process = Process(self.loop)
        process.at_end.append(lambda: self._end(member, process))
        if member.node in self.network.gone:  # nobody can start anything there
            process.kill()
        else:
            process.run(self._supervise, member, process, world, env)

    def _supervise(self, member: Member, process: Process, world: World, env: dict[str, str]) -> None:
        machine = SimulatedMachine(self, member.node, process)

        def start_rank(number: int, env: Mapping[str, str], *, is_root: bool) -> SimulatedRank:
            if member.node in self.cannot_fork:
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            member.rank = SimulatedRank(self, member.node, number, env, supervisor_looks)
            return member.rank

        def supervisor_looks() -> None:
            if member.supervisor is not None and member.process is process:
                process.run(member.supervisor.look)

        member.supervisor = None
        starter: Any = start_rank
        try:
            if (rank := start_first_rank(world, env, starter)) is not None:
                rank.limit_init(self.limits.init_s)
        except OSError:
            member.code = EXIT_FAILED
            process.kill()
            return
        member.supervisor = supervisor = Supervisor(world, rank, starter, self.limits, env, machine)

        async def life() -> None:
            code = await supervisor.run()
            if member.rank is not None:
                member.rank.close()
            member.code = code
            process.kill()

        self.loop.create_task(life())

    def _end(self, member: Member, process: Process) -> None:
        if member.process is process:
            if member.code is None:
                member.code = -9
            if member.rank is not None:  # the kernel ends it with its supervisor
                member.rank.is_alone = True
                member.rank.die()
            self._changed.set()

    def kill(self, member: Member) -> None:
        """Kills a supervisor, and with it its rank."""
        if member.process is not None:
            member.process.kill()

    async def run(self) -> None:
        """Starts all, and lets the launcher do what it does, until the job has ended."""
        leases = self.loop.create_task(self._watch_leases())
        launch: Callable[[], Awaitable[None]] = (
            self._keep_going if self.plan.launcher == "keeps" else self._run_generations
        )
        await launch()
        leases.cancel()
        self.ended = exit_record_of(self.folder, self.rendezvous.start)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(2 * POLL_S)
            for rank in list(self.ranks):
                rank.look_at_lease()

    async def _next_change(self, limit_s: float = 1.0) -> None:
        limit = self.loop.call_later(limit_s, self._changed.set)
        await self._changed.wait()
        limit.cancel()
        self._changed.clear()

    async def _keep_going(self) -> None:
        policy = RespawnPolicy(len(self.members))
        for member in self.members:
            self.begin(member)
        running, over_s = set(range(len(self.members))), 0.0
        while not policy.is_over and not self.problems:
            await self._next_change()
            now = self.loop.time()
            for member in [self.members[number] for number in sorted(running)]:
                if member.code is not None:
                    running.discard(member.number)
                    self.has_left = self.has_left or member.code > 0
                    policy.record_end(member.number, member.code, now, lived_s=now - member.began_s)
            if exit_record_of(self.folder, self.rendezvous.start) is not None:
                over_s = over_s or now
            if policy.is_overdue(now) or (over_s and now - over_s > LEAVE_S):
                break
            for number in policy.due(now) if self.asked_to_stop_s is None else ():
                running.add(number)
                self.begin(self.members[number], again=policy.in_vain(number) + 1)
        for member in self.members:
            self.kill(member)

    def _ask_as_killed(self) -> None:
        """Asks for what the run has asked for in case that all are killed, as a batch script does."""
        with suppress(FileNotFoundError):
            word = self.folder / WORD
            if "word=again-if-killed" in (before := word.read_text()):
                word.write_text(f"{before}word=again\ntime={self.wall_time('n0')}\n")

    async def _run_generations(self) -> None:
        while not self.problems:
            for member in self.members:
                self.begin(member)
            while all(member.code is None for member in self.members) and not self.problems:
                await self._next_change()
            if any(member.code for member in self.members):
                await asyncio.sleep(GRACE_S)
                for member in self.members:
                    self.kill(member)
            while any(member.code is None for member in self.members) and not self.problems:
                await self._next_change()
            if self.plan.launcher == "ends" or self.asked_to_stop_s is not None:
                return
            if all(member.code == -9 for member in self.members):
                self._ask_as_killed()
            following = asked_after(self.folder, self.rendezvous.start, self.generation)
            if not following:
                return
            self.generation = following
            self.network.gone.clear()
            self._changed.clear()
