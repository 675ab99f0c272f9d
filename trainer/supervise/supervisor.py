"""Supervises one rank: starts it as a child, watches it from outside, ends it when the coordinator says so.

No torch. It is not a rank itself: when the rank is stopped, or stuck in a library, the supervisor still
receives, reports and kills. If it is killed itself, the kernel ends its rank (prctl), and its neighbours in
the tree notice.
"""

import asyncio
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.phases import NOTHING_DONE
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_START_AGAIN, EXIT_TIMED_OUT
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord, first_cause, record_cause, supervisor_lost
from trainer.run.generations import GenerationClaim
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE, FLIGHT_RECORDS
from trainer.supervise import heartbeat
from trainer.supervise.coordinator import Actions, Coordinator
from trainer.supervise.diagnosis import Diagnosis, Missing, cut_off, text
from trainer.supervise.generation import Generation, fresh_variables
from trainer.supervise.heartbeat import RankState
from trainer.supervise.learned_limits import LEARNED_LIMITS, to_text
from trainer.supervise.limits import Limits
from trainer.supervise.membership import Membership, Place, place_in
from trainer.supervise.nccl_debug import flight_record
from trainer.supervise.nursery import Nursery
from trainer.supervise.rank_process import SIGNALS, end_rank
from trainer.supervise.rank_report import STACK_FILE, python_stack, report
from trainer.supervise.roster import SUCCESSORS, Roster
from trainer.supervise.state_folder import newest_kept
from trainer.supervise.tree import Message, Rendezvous, Tree
from trainer.supervise.tree_plan import Address
from trainer.supervise.world import (
    KEEPS_GOING,
    RESPAWNED,
    RESPAWNS,
    STARTS_AGAIN,
    World,
    first_world,
    number_of_spares,
    rank_variables,
)
from trainer.sysinfo import memory
from trainer.text.terminal import shown

TICK_S = 0.5
ORPHAN_S = 0.2
"""Seconds that a supervisor without a parent waits for an end that may be on its way.

Open MPI 5 leaves it half a second in all.
"""
HELD_UP_S = 2.0
"""Seconds of oversleeping from which a supervisor concludes that it was stopped, and its rank too.

Slurm suspends whole jobs.
"""
UNHEARD_S = 5.0
"""Seconds after which a late rank's supervisor takes rank 0's for unreachable.

Rank 0's supervisor asks everybody at once when it receives the report of a late rank.
"""

ROSTER_S, ROSTER_LATEST_S = 0.7, 10.0
"""Seconds without news after which a roster is sent, and the seconds after which it is sent in any case."""
REJOIN_FACTOR, REJOIN_S = 3.0, 15.0
"""Time for which a supervisor looks for another way to the coordinator.

It is so many `timeouts.silence_s` and so many seconds more.
"""


def supervise(
    world: World,
    command: Sequence[str],
    env: Mapping[str, str],
    limits: Callable[[], Limits],
    *,
    nursery: Nursery | None = None,
) -> int:
    """Runs the command as this rank, under the run's supervision; returns the run's exit code.

    `limits` is called once the rank runs. After a fault that the run survives, the command runs again; a
    `nursery` makes that fast.
    """
    nursery = nursery or Nursery(command, use=False)
    early: list[int] = []
    for number in SIGNALS:  # collects signals until the event loop handles them
        signal.signal(number, lambda caught, _frame: early.append(caught))
    start_rank = partial(Generation, nursery=nursery)
    first = first_world(world, env)
    generation = None
    if first is not None:
        own = {} if first.size == world.size else rank_variables(first, _cross(first), env)
        generation = start_rank(world.generation, env={**env, **own}, is_root=first.rank == 0)
    supervisor: Supervisor | None = None
    try:
        job_limits = limits()
        nursery.keep_if(job_limits.max_restarts > 0)
        if generation is not None:
            heartbeat.limit_init(generation.memory, job_limits.init_s)
        elif job_limits.max_restarts > 0:
            nursery.fill(env)  # a spare takes a lost one's place at once
        supervisor = Supervisor(world, generation, start_rank, job_limits, env)
        return asyncio.run(supervisor.run(early))
    finally:
        for number in SIGNALS:  # one that comes now would only change the exit code
            signal.signal(number, signal.SIG_IGN)
        last = supervisor.generation if supervisor else generation
        if last is not None:
            last.close()
        nursery.close()


def _cross(first: World) -> tuple[int, int]:
    """Returns Horovod's rank and size across nodes in the first generation: all nodes have as many ranks."""
    return first.rank // first.local_size, first.size // first.local_size


class Supervisor:
    """Supervises one rank, or none for now; `run` is its whole life."""

    def __init__(
        self,
        world: World,
        generation: Generation | None,
        start_rank: Callable[..., Generation],
        limits: Limits,
        env: Mapping[str, str],
    ) -> None:
        """`world` is this supervisor's place among all supervisors.

        `start_rank` starts the rank of a generation, given its number, its environment (made from `env`) and
        whether it is rank 0.
        """
        self.generation = generation
        """The rank as it runs now; after a fault another one takes its place. None: there is none."""
        self._world, self._start_rank, self._limits, self._env = world, start_rank, limits, env
        first = first_world(world, env)
        self._rank = first.rank if first is not None else world.rank
        """Number of the rank in the present world; without a rank the number of this supervisor."""
        spares = number_of_spares(world, env)
        self._ranks = range(world.size - spares)
        self._latest = world.generation
        """Highest number of a generation that this supervisor has heard of."""
        self._ran = world.generation
        """Number of the last generation that was started."""
        self._roster_message: Message | None = None
        self._rejoining = False
        self._roster_due = False
        self._changed_at = 0.0
        """Time at which a member has come or gone."""
        self._progress: Message = {}
        rendezvous = Rendezvous.from_env(env)
        late = bool(env.get(RESPAWNED))
        self._keeps_going = bool(env.get(KEEPS_GOING)) and rendezvous is not None and limits.max_restarts > 0
        self._exit_files = ExitFiles(limits.run_folder, rendezvous.start if rendezvous else "", world.rank)
        self._tree = (
            None
            if rendezvous is None
            else Tree(rendezvous, world.rank, world.node, limits.silence_s, late=late)
        )
        self._coordinator = (
            self._new_coordinator() if rendezvous is None or (world.rank == 0 and not late) else None
        )
        if self._tree is not None:
            self._tree.at_root = self._at_root
            self._tree.from_above = self._receive
            self._tree.about = lambda: {"idle": True} if self._is_idle else {}
        self._pauses: list[tuple[float, float]] = []
        """Time at which this process went on after each pause, and the pause's length, both in seconds."""
        self._learned: dict[str, str] = {}
        """Variable of the next generation's rank: the limits that the ranks so far have learned."""
        self._changed = asyncio.Event()
        self._ended: int | None = None
        self._orphaned = False
        self._tasks: set[asyncio.Task[None]] = set()

    def _new_coordinator(self) -> Coordinator:
        world, limits = self._world, self._limits
        alone = self._tree is None
        ranks = (world.rank,) if alone else self._ranks
        per_node = max(1, min(world.local_size, len(ranks)))
        fewest = len(ranks) if limits.min_nodes is None else min(len(ranks), limits.min_nodes * per_node)
        members = (world.rank,) if alone else range(world.size)
        return Coordinator(
            ranks,
            limits,
            self._exit_files,
            self._actions(together=not alone or world.size == 1),
            membership=Membership(members, len(ranks), fewest, limits.world_sizes),
            member=world.rank,
            keeps_going=self._keeps_going,
            respawns=bool(self._env.get(RESPAWNS)),
            starts_again=self._env.get(STARTS_AGAIN, ""),
            generation=world.generation,
        )

    def _at_root(self, message: Message) -> None:
        """Handles a message from below, where this supervisor is the coordinator's."""
        if self._coordinator is not None:
            self._coordinator.receive(message)

    @property
    def _is_idle(self) -> bool:
        """True if there is no rank, or if it is gone."""
        return self.generation is None or self.generation.ended

    async def run(self, early: Sequence[int] = ()) -> int:
        """Supervises until the run ends, here or elsewhere; returns its exit code.

        `early` holds signals that came before.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        if self._coordinator is not None:
            if self._world.generation == 1:
                await self._exit_files.remove_old()
            else:
                await self._coordinator.resume()
            about = {"idle": True} if self._is_idle else {}
            self._send_up({"kind": "joined", "rank": self._world.rank, "node": self._world.node, **about})
        if self._tree is not None:
            self._spawn(self._join(self._tree))
        for caught in early:
            self._on_signal(caught)
        while self._ended is None:
            self._inspect()
            before = time.monotonic()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK_S)
            self._changed.clear()
            if (pause := time.monotonic() - before - TICK_S) > HELD_UP_S:
                self._pauses.append((time.monotonic(), pause))
        if self.generation is not None:
            end_rank(self.generation.rank)
        if self._tree is not None:
            await self._tree.leave()
        return self._ended

    async def _join(self, tree: Tree) -> None:
        try:
            await tree.join(self._limits.init_s, self._claimed if self._env.get(RESPAWNED) else None)
        except TimeoutError as error:
            await self._end_alone(
                EXIT_TIMED_OUT,
                f"init: {error} (waited timeouts.init_s = {self._limits.init_s:g} s)",
                Missing(0, ""),
            )
        except OSError as error:
            await self._end_alone(
                EXIT_FAILED,
                f"the supervisors cannot meet at {tree.rendezvous.host}, port {tree.rendezvous.port}: "
                f"{error}",
            )

    async def _claimed(self) -> list[Address]:
        """Returns the address of the coordinator of the newest generation, as the run folder has it."""
        newest = await self._exit_files.newest_claim()
        return [(newest.host, newest.port)] if newest is not None and newest.port else []

    def _rank_state(self) -> RankState:
        """Returns the rank's state; time when this process was suspended does not count.

        So a suspended job keeps the rest of its limits.
        """
        if self.generation is None:
            return RankState("init", float("inf"), 0, time.monotonic(), 0, "", False)
        return heartbeat.read(self.generation.memory).resumed_after(
            lambda since: sum(min(pause, end - since) for end, pause in self._pauses if since < end)
        )

    def _actions(self, *, together: bool) -> Actions:
        """Returns what the coordinator can do here; only ranks that it reaches all can be started again."""

        async def variables() -> Mapping[str, str]:
            return await asyncio.to_thread(fresh_variables, self._env, self._address()[0])

        return Actions(
            broadcast=self._send_down,
            finish=self._finish,
            steps_done=lambda: self._rank_state().steps_done,
            has_begun=lambda: self._rank_state().phase not in NOTHING_DONE,
            say=lambda line: print(shown(line), file=sys.stderr, flush=True),
            fresh_variables=variables if together else None,
            moments=lambda: heartbeat.moments(self.generation.memory) if self.generation is not None else {},
            in_memory=lambda: newest_kept(self._env),
            claim=self._claim if self._tree is not None else None,
            below=lambda member: self._tree.plan.below(member) if self._tree is not None else set(),
            forget=self._forget,
            members_changed=self._send_roster_soon,
            leave=self._leave_cut_off,
        )

    def _address(self) -> Address:
        return self._tree.address if self._tree is not None else ("", 0)

    async def _claim(self, generation: int) -> GenerationClaim | None:
        assert self._tree is not None
        host, port = self._address()
        start, member = self._tree.rendezvous.start, self._world.rank
        return await self._exit_files.claim(
            GenerationClaim(start, generation, member, self._world.node, host, port)
        )

    def _forget(self, member: int) -> None:
        if self._tree is not None:
            self._tree.plan.forget(member)
            self._tree.drop(member)

    def _send_roster_soon(self) -> None:
        self._changed_at = time.monotonic()
        if self._keeps_going and not self._roster_due:
            self._roster_due = True
            self._spawn(self._send_roster())

    @property
    def _roster(self) -> Roster | None:
        return None if self._roster_message is None else Roster.from_message(self._roster_message)

    async def _send_roster(self) -> None:
        """Tells all supervisors who is there, when nobody has come or gone for ROSTER_S."""
        latest = time.monotonic() + ROSTER_LATEST_S
        while self._changed_at + ROSTER_S > time.monotonic() < latest:
            await asyncio.sleep(max(0.01, self._changed_at + ROSTER_S - time.monotonic()))
        self._roster_due = False
        if self._coordinator is None or self._tree is None or self._ended is not None:
            return
        generation, world, members = self._coordinator.state
        here = (self._world.rank, self._address())
        succession = (here, *self._tree.plan.successors(SUCCESSORS))
        self._tree.down(Roster(generation, world, members, succession).to_message())

    def _inspect(self) -> None:
        """Checks whether the rank has ended or has passed a limit."""
        generation = self.generation
        if generation is None or generation.ending:
            return
        self._send_progress()
        code = generation.rank.poll()
        if code is not None:
            if not generation.reported_end:
                generation.reported_end = True
                self._report_end(code)
            return
        state = self._rank_state()
        if state.late and not generation.reported_late:
            generation.reported_late = True
            what = f"{state.late_text} (noticed on rank {self._rank})"
            self._send_up_about_rank({"kind": "late", "what": what})
            self._spawn(self._end_if_unheard(what, generation))
        generation.reported_late = state.late

    def _send_progress(self) -> None:
        """Tells a coordinator that has no heartbeat of its own about rank 0."""
        if self._rank == 0 and self._coordinator is None and self._keeps_going:
            state = self._rank_state()
            now = {"steps_done": state.steps_done, "begun": state.phase not in NOTHING_DONE}
            if now != self._progress:
                self._progress = now
                self._send_up_about_rank({"kind": "progress", **now})

    def _report_end(self, code: int) -> None:
        assert self.generation is not None
        if code in (EXIT_DONE, EXIT_PREEMPTED):
            cause = first_cause(self.generation.folder)
            self._send_up_about_rank(
                {
                    "kind": "done",
                    "rank": self._rank,
                    "code": code,
                    "reason": cause.reason if cause else "",
                }
            )
            return
        state = self._rank_state()
        where = f"{state.phase}, step {state.step}" if state.step else state.phase
        record = first_cause(self.generation.folder) or ExitRecord(
            self._rank, self._world.node, EXIT_FAILED, "", time.time()
        )
        if code < 0:
            record = self._killed(-code, where)
        elif not record.reason:
            record = ExitRecord(
                self._rank,
                self._world.node,
                code,
                f"exited with code {code} in {where}",
                time.time(),
            )
        self._send_up_about_rank(
            {
                "kind": "failed",
                "record": asdict(record),
                "step": state.step,
                "waiting": code > 0 and state.waiting,
                "killed": code == -signal.SIGKILL,
            }
        )

    def _killed(self, number: int, where: str) -> ExitRecord:
        name = signal.Signals(number).name
        most_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # that of the rank, which has ended
        hint = (
            f"; the kernel does this when memory runs out: {memory.hint(most_kb)}"
            if number == signal.SIGKILL
            else ""
        )
        assert self.generation is not None
        stack = self.generation.folder / STACK_FILE
        return ExitRecord(
            self._rank,
            self._world.node,
            EXIT_FAILED,
            f"killed by {name} in {where}{hint}",
            time.time(),
            stack.read_text(errors="replace")[:4000] if stack.exists() else "",
        )

    def _receive(self, message: Message) -> None:
        """Handles a message that the coordinator sent to all."""
        generation = self.generation
        match message["kind"]:
            case "stop" if generation is not None:
                heartbeat.request_stop(generation.memory)
            case "collect" if generation is not None:
                generation.report_requested = True
                self._spawn(self._send_report(generation))
            case "stacks" if generation is not None and self._rank in message["ranks"]:
                self._spawn(self._send_stack(generation))
            case "roster" if self._coordinator is None:
                self._roster_message = message  # a large one takes a while to read, and is seldom needed
            case "regroup":
                self._latest = max(self._latest, message["generation"])
                self._spawn(self._end_generation(message["generation"]))
            case "meet" if message["member"] == self._world.rank:
                self._spawn(self._answer_meeting(message["generation"]))
            case "start":
                self._latest = max(self._latest, message["generation"])
                self._ran = message["generation"]
                if self._is_idle:
                    self._start_generation(message)
                else:  # it was taken for lost, and has not heard that its rank must end
                    self._spawn(self._end_and_start(message))
            case "orphaned":
                self._on_orphaned(message)
            case "cut off" if self._coordinator is None:
                self._end(EXIT_FAILED)
            case "end":
                self._end(message["code"])

    async def _end_generation(self, following: int) -> None:
        """Ends the rank, and confirms it, so that the generation with the number `following` can start."""
        if self.generation is not None:
            await self.generation.end()
        in_memory = newest_kept(self._env)
        self._send_up(
            {"kind": "ended", "rank": self._world.rank, "generation": following, "in_memory": in_memory}
        )

    async def _answer_meeting(self, generation: int) -> None:
        """Chooses where the ranks of a generation meet whose rank 0 will be here."""
        answer: Message = {"kind": "meeting", "generation": generation}
        try:
            answer["variables"] = await asyncio.to_thread(fresh_variables, self._env, self._address()[0])
        except OSError as error:
            answer["problem"] = str(error)
        self._send_up(answer)

    async def _end_and_start(self, message: Message) -> None:
        if self.generation is not None:
            await self.generation.end()
        self._start_generation(message)

    def _start_generation(self, message: Message) -> None:
        """Starts the rank again, if it has a place in the world of this generation."""
        number, variables = message["generation"], dict(message["variables"])
        if "world" in message:
            place = place_in(message["world"], self._world.rank)
            self._rank = self._world.rank if place is None else place.rank
            if place is None:
                self.generation = None
                return
            variables |= self._place_variables(place)
        if self._ended is not None or number != self._latest:
            return
        try:
            if self.generation is not None and (state := heartbeat.read(self.generation.memory)).ranks:
                self._learned = {LEARNED_LIMITS: to_text(state.learned, state.ranks)}
            own = {**self._env, **variables, **self._learned}
            self.generation = self._start_rank(number, env=own, is_root=self._rank == 0)
        except OSError as error:
            reason = f"the rank cannot be started again: {error}"
            record = ExitRecord(self._rank, self._world.node, EXIT_FAILED, reason, time.time())
            self._send_up(
                {"kind": "failed", "record": asdict(record), "waiting": False, "generation": number}
            )
            return
        heartbeat.limit_init(self.generation.memory, self._limits.init_s)

    def _place_variables(self, place: Place) -> dict[str, str]:
        world = replace(
            self._world,
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
        )
        return rank_variables(world, place.cross, self._env)

    async def _send_report(self, generation: Generation) -> None:
        """Sends this rank's report. NCCL's flight record is saved first, since the end may follow at once."""
        own = report(self._rank, self._world.node, generation.rank.pid, self._rank_state())
        if self._limits.run_folder:
            await flight_record(generation.folder, Path(self._limits.run_folder, FLIGHT_RECORDS))
        self._send_up({"kind": "report", "report": own.to_json(), "generation": generation.number})

    async def _send_stack(self, generation: Generation) -> None:
        rank = self._rank
        stack = await python_stack(generation.rank.pid, generation.folder)
        self._send_up({"kind": "stack", "rank": rank, "stack": stack, "generation": generation.number})

    def _on_orphaned(self, lost: Message) -> None:
        """Handles the loss of the supervisor above, or of one further up (`relayed`)."""
        if self._keeps_going and self._roster_message is not None and not lost["cut"]:
            if self._coordinator is None and not self._rejoining:
                self._rejoining = not lost["relayed"]
                self._spawn(self._rejoin(lost))
        elif not self._orphaned:
            self._orphaned = True
            self._spawn(self._leave_orphaned(lost))

    async def _rejoin(self, lost: Message) -> None:
        """Ends the rank at once, since others may go on without it, and finds another way to the coordinator.

        If this supervisor is the next in the order of succession, it takes the coordinator's place.
        """
        assert self._tree is not None
        ending = None if self.generation is None else asyncio.ensure_future(self.generation.end())
        if lost["relayed"]:  # the one above looks for another way
            if ending is not None:
                await ending
            self._send_up({"kind": "ended", "rank": self._world.rank, "generation": self._latest + 1})
            return
        roster = self._roster
        assert roster is not None
        self._tree.lose_parent()
        try:
            dead = await self._tree.rejoin(
                roster.succession, REJOIN_FACTOR * self._limits.silence_s + REJOIN_S
            )
        except TimeoutError:
            self._end_cut_off(EXIT_FAILED, f"rank {lost['rank']} on {lost['node']}")
            return
        finally:
            self._rejoining = False
        if ending is not None:
            await ending
        if dead is None:
            self._tree.call_roll()
        else:
            await self._take_over(roster, sorted(dead))

    async def _take_over(self, roster: Roster, dead: Sequence[int]) -> None:
        """Becomes the coordinator; the processes of `dead` are surely gone."""
        assert self._tree is not None
        self._coordinator = self._new_coordinator()
        self._tree.call_roll()
        root = roster.succession[0][0]
        members = [(number, node) for number, node in roster.members if number != self._world.rank]
        await self._coordinator.take_over(
            self._ran,
            max(self._latest, roster.generation),
            roster.world,
            members,
            Missing(root, roster.node_of(root)),
            dead,
        )

    def _on_signal(self, number: int) -> None:
        self._send_up(
            {"kind": "stop", "signal": int(number), "rank": self._world.rank, "node": self._world.node}
        )

    async def _leave_orphaned(self, lost: Message) -> None:
        """Ends this rank after its parent in the tree is gone.

        If the coordinator's decision arrives first, that counts instead.
        """
        await asyncio.sleep(ORPHAN_S)
        late = self._rank_state().late
        code = self.generation.rank.poll() if self.generation is not None else None
        own = EXIT_TIMED_OUT if late else code if code is not None and code > 0 else EXIT_FAILED
        if lost["relayed"]:  # the supervisor that lost its own parent reports it
            self._end(own)
        elif lost["cut"]:
            self._end_cut_off(own, f"rank {lost['rank']} on {lost['node']}")
        else:
            reason = supervisor_lost(lost["reason"])
            await self._end_alone(own, reason, Missing(lost["rank"], lost["node"]))

    def _leave_cut_off(self, other: str) -> None:
        """Ends this supervisor and all below it, since others go on without them."""
        if self._tree is not None:
            self._tree.ending = True
            self._tree.down({"kind": "cut off", "other": other})
        self._end_cut_off(EXIT_FAILED, other)

    def _end_cut_off(self, code: int, other: str) -> None:
        """Ends this rank without writing into the run folder.

        That folder may be on another network; it is left to supervisors that still reach each other.
        """
        if self._ended is None:
            self._print(ExitRecord(self._rank, self._world.node, code, cut_off(other), time.time()))
            self._end(code)

    async def _end_if_unheard(self, what: str, generation: Generation) -> None:
        await asyncio.sleep(UNHEARD_S)
        heard = generation.report_requested or generation.ending
        if not heard and self._tree is not None and self._coordinator is None:
            await self._end_alone(
                EXIT_TIMED_OUT, f"timed out: {what}", Missing(0, self._tree.rendezvous.host)
            )

    async def _end_alone(self, code: int, reason: str, missing: Missing | None = None) -> None:
        """Ends this rank if rank 0's supervisor does not decide, not yet or no longer.

        Writes the cause in its place.
        """
        if self._ended is not None:
            return
        rank, node = (missing.rank, missing.node) if missing else (self._rank, self._world.node)
        its = self.generation
        own = [] if its is None else [report(self._rank, self._world.node, its.rank.pid, self._rank_state())]
        diagnosis = Diagnosis(reason, own, [missing] if missing else [])
        number = its.number if its is not None else self._latest
        record = ExitRecord(rank, node, code, reason, time.time(), text(diagnosis, {}, ""), generation=number)
        self._print(record)
        if self._may_start_again:
            await self._exit_files.request_start(record, self._ran + 1)
            self._end(EXIT_START_AGAIN)
            return
        # The exit record is first: a launcher that saw rank 0 die kills the others within half a second.
        await self._exit_files.write(EXIT_FILE, asdict(record))
        await self._exit_files.write(DIAGNOSIS_FILE, diagnosis.to_json(code, {}))
        self._end(code)

    @property
    def _may_start_again(self) -> bool:
        """True if the launcher starts all supervisors again, and there is something to go on from."""
        begun = self._ran > 1 or self._rank_state().phase not in NOTHING_DONE
        return bool(self._env.get(STARTS_AGAIN)) and self._limits.max_restarts > 0 and begun

    def _send_up_about_rank(self, message: Message) -> None:
        assert self.generation is not None
        self._send_up({**message, "generation": self.generation.number})

    def _send_up(self, message: Message) -> None:
        if self._coordinator is not None:
            self._coordinator.receive(message)
        elif self._tree is not None:
            self._tree.up(message)

    def _send_down(self, message: Message) -> None:
        if self._tree is not None:
            self._tree.down(message)
        else:
            self._receive(message)

    def _finish(self, record: ExitRecord) -> None:
        """Ends the run, on rank 0.

        Every rank leaves with the cause's exit code, so that no launcher can choose another.
        """
        if record.exit_code not in (EXIT_DONE, EXIT_START_AGAIN):
            self._print(record)
        if self._tree is not None:
            self._tree.ending = True
        self._send_down({"kind": "end", "code": record.exit_code})

    def _end(self, code: int) -> None:
        if self._tree is not None:
            self._tree.ending = True
        self._ended = code if self._ended is None else self._ended
        self._changed.set()

    def _print(self, record: ExitRecord) -> None:
        print(shown(record.headline()), file=sys.stderr, flush=True)
        # If the cause was recorded, the process that started the launcher shows the details, last.
        if not record_cause(record, self._env) and record.details:
            print(shown(record.details), file=sys.stderr, flush=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
