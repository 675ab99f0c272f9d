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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.phases import NOTHING_DONE
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_TIMED_OUT
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord, first_cause, record_cause, supervisor_lost
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE, FLIGHT_RECORDS
from trainer.supervise import heartbeat
from trainer.supervise.coordinator import Actions, Coordinator
from trainer.supervise.diagnosis import Diagnosis, Missing, cut_off, text
from trainer.supervise.generation import Generation, fresh_variables
from trainer.supervise.heartbeat import RankState
from trainer.supervise.learned_limits import LEARNED_LIMITS, to_text
from trainer.supervise.limits import Limits
from trainer.supervise.nccl_debug import flight_record
from trainer.supervise.nursery import Nursery
from trainer.supervise.rank_process import SIGNALS, end_rank
from trainer.supervise.rank_report import STACK_FILE, python_stack, report
from trainer.supervise.tree import Message, Rendezvous, Tree
from trainer.supervise.world import World
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
    start_rank = partial(Generation, nursery=nursery, is_root=world.rank == 0)
    generation = start_rank(1, env=env)
    supervisor: Supervisor | None = None
    try:
        job_limits = limits()
        nursery.keep_if(job_limits.max_restarts > 0)
        heartbeat.limit_init(generation.memory, job_limits.init_s)
        supervisor = Supervisor(world, generation, start_rank, job_limits, env)
        return asyncio.run(supervisor.run(early))
    finally:
        for number in SIGNALS:  # one that comes now would only change the exit code
            signal.signal(number, signal.SIG_IGN)
        (supervisor.generation if supervisor else generation).close()
        nursery.close()


class Supervisor:
    """Supervises one rank; `run` is its whole life."""

    def __init__(
        self,
        world: World,
        generation: Generation,
        start_rank: Callable[..., Generation],
        limits: Limits,
        env: Mapping[str, str],
    ) -> None:
        """`start_rank` starts the rank of a generation, given its number and environment (`env`)."""
        self.generation = generation
        """The rank as it runs now; after a fault another one takes its place."""
        self._world, self._start_rank, self._limits, self._env = world, start_rank, limits, env
        rendezvous = Rendezvous.from_env(env)
        ranks = (world.rank,) if rendezvous is None else range(world.size)
        self._exit_files = ExitFiles(limits.run_folder, rendezvous.start if rendezvous else "", world.rank)
        self._tree = (
            None if rendezvous is None else Tree(rendezvous, world.rank, world.node, limits.silence_s)
        )
        self._coordinator = (
            Coordinator(ranks, limits, self._exit_files, self._actions(together=len(ranks) == world.size))
            if rendezvous is None or world.rank == 0
            else None
        )
        if self._tree is not None:
            self._tree.at_root = (
                self._coordinator.receive if self._coordinator is not None else self._tree.at_root
            )
            self._tree.from_above = self._receive
        self._pauses: list[tuple[float, float]] = []
        """Time at which this process went on after each pause, and the pause's length, both in seconds."""
        self._learned: dict[str, str] = {}
        """Variable of the next generation's rank: the limits that the ranks so far have learned."""
        self._changed = asyncio.Event()
        self._ended: int | None = None
        self._orphaned = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, early: Sequence[int] = ()) -> int:
        """Supervises until the run ends, here or elsewhere; returns its exit code.

        `early` holds signals that came before.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        if self._coordinator is not None:
            await self._exit_files.remove_old()
            self._send_up({"kind": "joined", "rank": self._world.rank, "node": self._world.node})
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
        end_rank(self.generation.rank)
        if self._tree is not None:
            await self._tree.leave()
        return self._ended

    async def _join(self, tree: Tree) -> None:
        try:
            await tree.join(self._limits.init_s)
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

    def _rank_state(self) -> RankState:
        """Returns the rank's state; time when this process was suspended does not count.

        So a suspended job keeps the rest of its limits.
        """
        return heartbeat.read(self.generation.memory).resumed_after(
            lambda since: sum(min(pause, end - since) for end, pause in self._pauses if since < end)
        )

    def _actions(self, *, together: bool) -> Actions:
        """Returns what the coordinator can do here; only ranks that it reaches all can be started again."""

        async def variables() -> Mapping[str, str]:
            return await asyncio.to_thread(fresh_variables, self._env)

        return Actions(
            broadcast=self._send_down,
            finish=self._finish,
            steps_done=lambda: self._rank_state().steps_done,
            has_begun=lambda: self._rank_state().phase not in NOTHING_DONE,
            say=lambda line: print(shown(line), file=sys.stderr, flush=True),
            fresh_variables=variables if together else None,
            moments=lambda: heartbeat.moments(self.generation.memory),
        )

    def _inspect(self) -> None:
        """Checks whether the rank has ended or has passed a limit."""
        generation = self.generation
        if generation.ending:
            return
        code = generation.rank.poll()
        if code is not None:
            if not generation.reported_end:
                generation.reported_end = True
                self._report_end(code)
            return
        state = self._rank_state()
        if state.late and not generation.reported_late:
            generation.reported_late = True
            what = f"{state.late_text} (noticed on rank {self._world.rank})"
            self._send_up_about_rank({"kind": "late", "what": what})
            self._spawn(self._end_if_unheard(what, generation))
        generation.reported_late = state.late

    def _report_end(self, code: int) -> None:
        if code in (EXIT_DONE, EXIT_PREEMPTED):
            cause = first_cause(self.generation.folder)
            self._send_up_about_rank(
                {
                    "kind": "done",
                    "rank": self._world.rank,
                    "code": code,
                    "reason": cause.reason if cause else "",
                }
            )
            return
        state = self._rank_state()
        where = f"{state.phase}, step {state.step}" if state.step else state.phase
        record = first_cause(self.generation.folder) or ExitRecord(
            self._world.rank, self._world.node, EXIT_FAILED, "", time.time()
        )
        if code < 0:
            record = self._killed(-code, where)
        elif not record.reason:
            record = ExitRecord(
                self._world.rank,
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
        stack = self.generation.folder / STACK_FILE
        return ExitRecord(
            self._world.rank,
            self._world.node,
            EXIT_FAILED,
            f"killed by {name} in {where}{hint}",
            time.time(),
            stack.read_text(errors="replace")[:4000] if stack.exists() else "",
        )

    def _receive(self, message: Message) -> None:
        """Handles a message that the coordinator sent to all."""
        match message["kind"]:
            case "stop":
                heartbeat.request_stop(self.generation.memory)
            case "collect":
                self.generation.report_requested = True
                self._spawn(self._send_report())
            case "stacks" if self._world.rank in message["ranks"]:
                self._spawn(self._send_stack())
            case "regroup":
                self._spawn(self._end_generation(message["generation"]))
            case "start":
                self._start_generation(message["generation"], message["variables"])
            case "orphaned" if not self._orphaned:
                self._orphaned = True
                self._spawn(self._leave_orphaned(message))
            case "end":
                self._end(message["code"])

    async def _end_generation(self, following: int) -> None:
        """Ends the rank, and confirms it, so that the generation with the number `following` can start."""
        await self.generation.end()
        self._send_up({"kind": "ended", "rank": self._world.rank, "generation": following})

    def _start_generation(self, number: int, variables: Mapping[str, str]) -> None:
        """Starts the rank again; `variables` say where the ranks of this generation meet."""
        if self._ended is not None:
            return
        try:
            if (state := heartbeat.read(self.generation.memory)).ranks:
                self._learned = {LEARNED_LIMITS: to_text(state.learned, state.ranks)}
            self.generation = self._start_rank(number, env={**self._env, **variables, **self._learned})
        except OSError as error:
            reason = f"the rank cannot be started again: {error}"
            record = ExitRecord(self._world.rank, self._world.node, EXIT_FAILED, reason, time.time())
            self._send_up(
                {"kind": "failed", "record": asdict(record), "waiting": False, "generation": number}
            )
            return
        heartbeat.limit_init(self.generation.memory, self._limits.init_s)

    async def _send_report(self) -> None:
        """Sends this rank's report. NCCL's flight record is saved first, since the end may follow at once."""
        generation = self.generation
        own = report(self._world.rank, self._world.node, generation.rank.pid, self._rank_state())
        if self._limits.run_folder:
            await flight_record(generation.folder, Path(self._limits.run_folder, FLIGHT_RECORDS))
        self._send_up({"kind": "report", "report": own.to_json(), "generation": generation.number})

    async def _send_stack(self) -> None:
        generation = self.generation
        stack = await python_stack(generation.rank.pid, generation.folder)
        self._send_up(
            {"kind": "stack", "rank": self._world.rank, "stack": stack, "generation": generation.number}
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
        code = self.generation.rank.poll()
        own = EXIT_TIMED_OUT if late else code if code is not None and code > 0 else EXIT_FAILED
        if lost["relayed"]:  # the supervisor that lost its own parent reports it
            self._end(own)
        elif lost["cut"]:
            self._end_cut_off(own, f"rank {lost['rank']} on {lost['node']}")
        else:
            reason = supervisor_lost(lost["reason"])
            await self._end_alone(own, reason, Missing(lost["rank"], lost["node"]))

    def _end_cut_off(self, code: int, other: str) -> None:
        """Ends this rank without writing into the run folder.

        That folder may be on another network; it is left to supervisors that still reach each other.
        """
        if self._ended is None:
            self._print(ExitRecord(self._world.rank, self._world.node, code, cut_off(other), time.time()))
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
        rank, node = (missing.rank, missing.node) if missing else (self._world.rank, self._world.node)
        own = report(self._world.rank, self._world.node, self.generation.rank.pid, self._rank_state())
        diagnosis = Diagnosis(reason, [own], [missing] if missing else [])
        record = ExitRecord(
            rank, node, code, reason, time.time(), text(diagnosis, {}, ""), generation=self.generation.number
        )
        self._print(record)
        # The exit record is first: a launcher that saw rank 0 die kills the others within half a second.
        await self._exit_files.write(EXIT_FILE, asdict(record))
        await self._exit_files.write(DIAGNOSIS_FILE, diagnosis.to_json(code, {}))
        self._end(code)

    def _send_up_about_rank(self, message: Message) -> None:
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
        if record.exit_code:
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
