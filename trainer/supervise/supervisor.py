"""Supervises one rank: starts it as a child, watches it from outside, ends it when the coordinator says so.

No torch. It is not a rank itself: when the rank is stopped, or stuck in a library, the supervisor still
receives, reports and kills. If it is killed itself, the kernel ends its rank (prctl), and its neighbours in
the tree notice.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.errors import EXIT_FAILED, EXIT_TIMED_OUT
from trainer.run.exit_files import ExitFiles
from trainer.run.generations import newest_claim
from trainer.run.notify import Notifier
from trainer.supervise import messages
from trainer.supervise.background import on_error
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.coordinator_host import CoordinatorHost, ParentLoss
from trainer.supervise.coordinate.diagnosis import Missing
from trainer.supervise.ending import Ending
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine, now
from trainer.supervise.messages import Message
from trainer.supervise.network.link import REPEAT_S
from trainer.supervise.network.tree import Tree
from trainer.supervise.network.tree_plan import Address
from trainer.supervise.rank.fork_server import ForkServer
from trainer.supervise.rank.generation import RankOfGeneration
from trainer.supervise.rank.own_rank import OwnRank
from trainer.sysinfo.signals import SIGNALS, collect_requests
from trainer.world.launchers import World, cross_of, first_world, rank_variables
from trainer.world.rendezvous import Rendezvous
from trainer.world.variables import KEEPS_GOING, RESPAWNED

TICK_S = 0.5
HELD_UP_S = 2.0
"""Seconds of oversleeping from which a supervisor concludes that it was stopped, and its rank too.

Slurm suspends whole jobs.
"""
UNHEARD_S = 5.0
"""Seconds after which a late rank's supervisor takes rank 0's for unreachable.

Rank 0's supervisor asks everybody at once when it receives the report of a late rank.
"""


def supervise(
    world: World,
    command: Sequence[str],
    env: Mapping[str, str],
    limits: Callable[[], Limits],
    *,
    fork_server: ForkServer | None = None,
) -> int:
    """Runs the command as this rank, under the run's supervision; returns the run's exit code.

    `limits` is called once the rank runs. After a fault that the run survives, the command runs again; a
    `fork_server` makes that fast.
    """
    fork_server, machine = fork_server or ForkServer(command, use=False), Machine()
    early = collect_requests()  # until the event loop handles them
    start_rank = partial(RankOfGeneration, fork_server=fork_server)
    job_limits = limits() if env.get(RESPAWNED) else None
    if job_limits is not None and world.rank == 0 and _was_alone(job_limits, env):
        env = {name: value for name, value in env.items() if name != RESPAWNED}
    generation = start_first_rank(world, env, start_rank)
    supervisor: Supervisor | None = None
    try:
        job_limits = job_limits or limits()
        machine.files.prepare()  # after the last fork of this process
        fork_server.keep_if(job_limits.max_restarts > 0)
        if generation is not None:
            generation.limit_init(job_limits.init_s)
        elif job_limits.max_restarts > 0:
            fork_server.fill(env)  # a spare takes a lost one's place at once
        supervisor = Supervisor(world, generation, start_rank, job_limits, env, machine)
        return _run(supervisor, early)
    finally:
        for number in SIGNALS:  # one that comes now would only change the exit code
            signal.signal(number, signal.SIG_IGN)
        last = supervisor.generation if supervisor else generation
        if last is not None:
            last.close()
        fork_server.close()


def start_first_rank(
    world: World, env: Mapping[str, str], start_rank: Callable[..., RankOfGeneration]
) -> RankOfGeneration | None:
    """Starts the rank that a supervisor has in the first generation; returns None if it has none there."""
    first = first_world(world, env)
    if first is None:
        return None
    own = {} if first.size == world.size else rank_variables(first, cross_of(first), env)
    return start_rank(world.generation, env={**env, **own}, is_root=first.rank == 0)


def _was_alone(limits: Limits, env: Mapping[str, str]) -> bool:
    """Returns whether rank 0's supervisor was killed before any other had reached it.

    Then all still call it, nobody else can be the root, and it begins as if for the first time.
    """
    rendezvous = Rendezvous.from_env(env)
    if rendezvous is None or not limits.run_folder:
        return False
    return newest_claim(Path(limits.run_folder), rendezvous.start) is None


def _run(supervisor: "Supervisor", early: Sequence[int]) -> int:
    """Runs the supervisor to its end; returns its exit code."""
    codes: list[int] = []

    async def life() -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, supervisor.on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, supervisor.look)
        codes.append(await supervisor.run(early))
        # When its loop closes, asyncio first closes the file to which it would still write a late signal.
        signal.set_wakeup_fd(-1)

    try:
        asyncio.run(life())
    except RuntimeError:
        if not codes:  # else asyncio needed a thread to end its own threads, and there may be no more
            raise
    return codes[0]


class Supervisor:
    """Supervises one rank, or none for now; `run` is its whole life.

    Its parts are its rank (`own_rank`), the coordinator if it is here (`coordinator_host`), the loss of the
    supervisor above (`parent_loss`) and its end (`ending`).
    """

    def __init__(
        self,
        world: World,
        generation: RankOfGeneration | None,
        start_rank: Callable[..., RankOfGeneration],
        limits: Limits,
        env: Mapping[str, str],
        machine: Machine,
    ) -> None:
        """`world` is this supervisor's place among all supervisors.

        `start_rank` starts the rank of a generation, given its number, its environment (made from `env`) and
        whether it is rank 0.
        """
        rendezvous = Rendezvous.from_env(env)
        late = bool(env.get(RESPAWNED))
        tree = (
            None
            if rendezvous is None
            else Tree(rendezvous, world.rank, world.node, limits.silence_s, machine, late=late)
        )
        self._context = SupervisorContext(
            world,
            limits,
            env,
            ExitFiles(
                limits.run_folder,
                rendezvous.start if rendezvous else "",
                Notifier(limits.run, limits.notify, env),
                work=machine.files,
                wall_time=machine.wall_time,
            ),
            machine,
            tree,
            keeps_going=bool(env.get(KEEPS_GOING)) and rendezvous is not None and limits.max_restarts > 0,
            send_up=self._send_up,
        )
        self._own = OwnRank(self._context, generation, start_rank, self._on_late)
        self._ending = Ending(self._context, self._own)
        self._host = CoordinatorHost(self._context, self._own, self._ending, self._send_down)
        self._parent_loss = ParentLoss(self._context, self._own, self._ending, self._host)
        self._asked = False
        """True once the run has been asked to stop, as far as this supervisor has heard."""
        self._signalled_at: float | None = None
        """Time of the first signal that asked this supervisor for that."""
        self._has_joined = False
        if tree is None or (world.rank == 0 and not late):
            self._host.take()
        if tree is not None:
            tree.at_root = self._host.receive
            tree.from_above = self._receive
            tree.about = self._joined
            if self._context.keeps_going and self._host.coordinator is not None:
                tree.before_first = self._host.coordinator.claim

    @property
    def generation(self) -> RankOfGeneration | None:
        """The rank as it runs now; None: there is none."""
        return self._own.generation

    def _joined(self) -> messages.Joined:
        """Returns what this supervisor says of itself when it joins.

        A request to stop that a lost coordinator had got reaches its successor that way.
        """
        world, idle = self._context.world, self._own.is_idle
        in_memory = self._context.machine.newest_kept(self._context.env) if idle else 0
        signalled = self._signalled_at is not None
        return messages.Joined(
            world.rank, world.node, idle, self._asked, signalled, in_memory, ran=self._own.ran
        )

    async def run(self, early: Sequence[int] = ()) -> int:
        """Supervises until the run ends, here or elsewhere; returns its exit code.

        `early` holds signals that came before.
        """
        context, changed = self._context, self._ending.changed
        loop = asyncio.get_running_loop()
        on_error(self._ending.fail)
        if self._host.coordinator is not None:
            await self._host.coordinator.begin()
            self._send_up(self._joined())
        if context.tree is not None:
            context.spawn(self._join(context.tree))
        for caught in early:
            loop.call_soon(self.on_signal, caught)
        while self._ending.code is None:
            self._own.inspect(tells_progress=self._host.coordinator is None and context.keeps_going)
            before = now()
            tick = loop.call_later(TICK_S, changed.set)
            await changed.wait()
            tick.cancel()
            changed.clear()
            if (pause := now() - before - TICK_S) > HELD_UP_S:
                self._own.record_pause(pause)
        if self.generation is not None:
            self.generation.kill()
        if context.tree is not None:
            await context.tree.leave()
        return self._ending.code

    async def _join(self, tree: Tree) -> None:
        init_s = self._context.limits.init_s
        try:
            await tree.join(init_s, self._claimed if self._context.env.get(RESPAWNED) else None)
            self._has_joined = True
        except TimeoutError as error:
            reason = f"init: {error} (waited timeouts.init_s = {init_s:g} s)"
            await self._ending.end_unjoined(EXIT_TIMED_OUT, reason, Missing(0, ""))
        except OSError as error:
            where = f"{tree.rendezvous.host}, port {tree.rendezvous.port}"
            reason = f"the supervisors cannot meet at {where}: {error}"
            await self._ending.end_unjoined(EXIT_FAILED, reason)

    async def _claimed(self) -> list[Address]:
        """Returns the address of the coordinator of the newest generation, as the run folder has it."""
        newest = None
        with suppress(OSError):
            newest = await self._context.exit_files.newest_claim()
        return [(newest.host, newest.port)] if newest is not None and newest.port else []

    def _receive(self, message: Message) -> None:
        """Handles a message that the coordinator sent to all."""
        own, generation, spawn = self._own, self._own.generation, self._context.spawn
        match message:
            case messages.Stop():
                self._asked = self._asked or not message.to_grow
                own.request_stop()
            case messages.Collect() if generation is not None:
                generation.report_requested = True
                spawn(own.send_report(generation))
            case messages.CollectStacks() if generation is not None and own.number in message.ranks:
                spawn(own.send_stack(generation))
            case messages.Roster() if self._host.coordinator is None:
                self._parent_loss.roster, own.ran = message, max(own.ran, message.ran)
            case messages.Regroup():
                own.latest = max(own.latest, message.generation)
                spawn(own.end_before(message.generation))
            case messages.Meet() if message.member == self._context.world.rank:
                spawn(own.answer_meeting(message.generation))
            case messages.Start():
                own.latest = max(own.latest, message.generation)
                own.ran = message.generation
                if own.is_idle:
                    own.start(message)
                else:  # it was taken for lost, and has not heard that its rank must end
                    spawn(own.end_and_start(message))
            case messages.Orphaned():
                self._parent_loss.handle(message)
            case messages.CutOff() if self._host.coordinator is None:
                self._ending.end(EXIT_FAILED)
            case messages.End():
                self._ending.end(message.code)

    def look(self) -> None:
        """Looks at the rank at once, as after the end of a child."""
        self._ending.changed.set()

    def on_signal(self, number: int) -> None:
        """Takes a signal as a request to stop the run."""
        world, tree = self._context.world, self._context.tree
        first_at = self._signalled_at = self._signalled_at or now()
        self._asked = True
        request = messages.StopRequest(int(number), world.rank, world.node)
        if self._host.coordinator is not None or tree is None or tree.has_parent:
            self._send_up(request)
        elif now() - first_at <= REPEAT_S:
            pass  # the coordinator hears of it when this supervisor joins
        elif self._has_joined:
            self._send_up(replace(request, again=True))  # it waits there for another parent
        else:
            reason = f"a second signal ({int(number)}) came before it had joined the others"
            self._context.spawn(self._ending.end_unjoined(128 + number, reason))

    def _on_late(self, what: str, generation: RankOfGeneration) -> None:
        self._context.spawn(self._end_if_unheard(what, generation))

    async def _end_if_unheard(self, what: str, generation: RankOfGeneration) -> None:
        await asyncio.sleep(UNHEARD_S)  # by then the coordinator has asked, if it has heard
        heard = generation.report_requested or generation.ending
        tree = self._context.tree
        if not heard and tree is not None and self._host.coordinator is None:
            missing = Missing(0, tree.rendezvous.host)
            await self._ending.end_alone(EXIT_TIMED_OUT, f"timed out: {what}", missing)

    def _send_up(self, message: Message) -> None:
        if self._host.coordinator is not None:
            self._host.receive(message)
        elif self._context.tree is not None:
            self._context.tree.up(message)

    def _send_down(self, message: Message) -> None:
        if self._context.tree is not None:
            self._context.tree.down(message)
        else:
            self._receive(message)
