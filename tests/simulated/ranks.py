"""Simulated ranks: they meet, do steps together, keep and save them, and fail as backends do."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.simulated.loop import Process, SimulatedLoop
from tests.simulated.network import RETRY_S, Network
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from trainer.run.checkpoints import MANIFEST, folder_name, newest_step
from trainer.run.exit_record import ExitRecord
from trainer.run.layout import CHECKPOINTS
from trainer.supervise.coordinate.presence import REGROUP_S
from trainer.supervise.rank.rank_report import RankReport
from trainer.world.heartbeat import RankState
from trainer.world.launchers import detect
from trainer.world.lease import Lease

STEP_S, KEEP_EVERY, SAVE_EVERY = 0.5, 2, 10
THAWED_S = 9.0
"""Seconds that a rank may live on, once it is thawed: its lease, and what notices that it has run out."""


@dataclass
class Steps:
    """What the ranks of a run have done, as an observer sees it who misses nothing."""

    total: int
    done: int = 0
    """Highest step that any generation has done."""
    saved: int = 0
    training: "Training | None" = None
    """Ranks that have done the newest step."""
    begun: dict[int, int] = field(default_factory=dict)
    """Step from which each generation has gone on."""
    begun_s: dict[int, float] = field(default_factory=dict)
    """Time at which each has."""
    log: list[tuple[float, int, int]] = field(default_factory=list)
    """Time, generation and number of each step that was done."""


class Place(Protocol):
    """What a rank finds around it."""

    loop: SimulatedLoop
    rng: random.Random
    folder: Path
    steps: Steps
    backend: str
    network: Network
    kept: dict[str, int]
    ranks: "list[SimulatedRank]"
    """All that live."""

    def training(self, generation: int, port: str, size: int) -> "Training":
        """Returns the ranks that meet there."""

    async def reach_folder(self, node: str) -> None:
        """Waits until the run folder answers."""

    def check_folder(self, node: str) -> None:
        """Raises OSError if the run folder takes nothing."""

    def wall_time(self, node: str) -> float:
        """Returns the time of day, as a node believes."""

    def broken(self, invariant: str, what: str) -> None:
        """Records that something happened which never may."""


class Training:
    """Ranks of one generation, which wait for one another at each collective."""

    def __init__(self, place: Place, generation: int, size: int) -> None:
        self._place, self.generation, self._size = place, generation, size
        self._arrived: list[tuple[SimulatedRank, Any, asyncio.Future[list[Any]]]] = []
        self._is_broken = False

    async def all(self, rank: "SimulatedRank", value: Any, takes_s: float = 0.0) -> list[Any]:
        """Returns the values of all ranks that long after all have come.

        Raises ConnectionError after a death.
        """
        loop = self._place.loop
        answer: asyncio.Future[list[Any]] = loop.create_future()
        self._arrived.append((rank, value, answer))
        if len(self._arrived) == self._size and not any(each.process.is_dead for each, _, _ in self._arrived):
            arrived, self._arrived = self._arrived, []
            loop.call_later(takes_s, self._finish, arrived)
        elif self._is_broken:
            self._fail_soon(answer)
        return await answer

    def _finish(self, arrived: "list[tuple[SimulatedRank, Any, asyncio.Future[list[Any]]]]") -> None:
        if (cut := self._place.network.cut) and not any(rank.process.is_dead for rank, _, _ in arrived):
            nodes = {rank.node for rank, _, _ in arrived}
            if any(a in nodes and b in nodes for a, b in cut):
                self._place.loop.call_later(RETRY_S, self._finish, arrived)
                return
        if any(rank.process.is_dead for rank, _, _ in arrived):
            self._arrived += arrived
            if self._is_broken:
                for _, _, answer in arrived:
                    self._fail_soon(answer)
            return
        values = [value for _, value, _ in arrived]
        for _, _, answer in arrived:
            if not answer.done():
                answer.set_result(values)

    def lose(self, *, silently: bool) -> None:
        """Breaks the collectives of the others: Horovod's fail at once, torch's sooner or later, or never."""
        if not self._is_broken:
            self._is_broken = not silently
            for _, _, answer in () if silently else self._arrived:
                self._fail_soon(answer)

    def _fail_soon(self, answer: "asyncio.Future[list[Any]]") -> None:
        rng = self._place.rng
        if self._place.backend == "torch" and rng.random() < 0.3:
            return  # it waits until its limit has passed
        after_s = 0.2 if self._place.backend == "horovod" else rng.uniform(0.0, 3.0)
        error = ConnectionError("Connection closed by peer")
        self._place.loop.call_later(after_s, _fail, answer, error)


def _fail(answer: "asyncio.Future[list[Any]]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # the rank that waits may be dead, and then nobody takes it


class SimulatedRank:
    """Rank of one generation that has the methods of `RankOfGeneration`, and that faults may hit."""

    def __init__(
        self, place: Place, node: str, number: int, env: Mapping[str, str], look: Callable[[], None]
    ) -> None:
        """`look` tells its supervisor that it has ended."""
        self._place, self.node, self.number, self._look_again = place, node, number, look
        world = detect(env, node)
        self.rank, self._size, self._port = world.rank, world.size, env["MASTER_PORT"]
        self.reported_end = self.reported_late = self.report_requested = self.ending = self.ended = False
        place.ranks.append(self)
        self.pid = place.rng.randrange(2**22, 2**23)
        self.process = Process(place.loop)
        self.process.at_end.append(self._end_now)
        self.code: int | None = None
        self.hangs = self.is_stuck = self.is_doomed = False
        """Whether it does nothing more; whether the kernel cannot end it; whether that was tried."""
        self.thawed_s = self.doomed_s = 0.0
        self.is_alone = False
        """True once its supervisor is gone."""
        self.fails: tuple[int, str] | None = None
        """Exit code and reason with which it fails at its next step."""
        self._cause: ExitRecord | None = None
        self._stop = False
        self._lease, self._renewed = Lease(place.loop.time()), (0.0, 0.0)
        self._training: Training | None = None
        self._phase, self._step, self._began, self._limit_s = "init", 0, place.loop.time(), float("inf")
        self._collectives, self._waiting = 0, False
        self.begun_s = place.loop.time()
        self._moments: dict[str, float] = {}
        self.process.run(self._begin)

    def _begin(self) -> None:
        self._task = self._place.loop.create_task(self._live())

    async def _live(self) -> None:
        try:
            await self._train()
        except ConnectionError as error:
            self._leave(EXIT_FAILED, str(error))
        except OSError as error:
            self._leave(EXIT_FAILED, f"the checkpoint was not saved: {error.strerror}")

    async def _train(self) -> None:
        place, steps = self._place, self._place.steps
        await asyncio.sleep(place.rng.uniform(0.3, 2.0))
        self._moments["running"] = place.loop.time()
        await place.reach_folder(self.node)
        self._training = place.training(self.number, self._port, self._size)
        found = await self._together(max(place.kept.get(self.node, 0), self._saved()))
        begun = max(found)
        self._moments["connected"] = self._moments["prepared"] = self._moments["restored"] = place.loop.time()
        steps.begun[self.number] = begun
        steps.begun_s.setdefault(self.number, place.loop.time())
        self._begin_phase("first step", begun + 1, 60.0)
        if begun == steps.total:  # that was in memory
            await self._save(begun)
        for step in range(begun + 1, steps.total + 1):
            if step > begun + 1:
                self._begin_phase("step", step, 10.0)
            if self.fails is not None:
                self._leave(*self.fails)
                await asyncio.sleep(float("inf"))
            if self.hangs:
                await asyncio.sleep(float("inf"))
            stops = await self._together(self._stop, STEP_S * place.rng.uniform(0.8, 1.2))
            self._moments.setdefault("stepped", place.loop.time())
            self._count(step)
            if step % KEEP_EVERY == 0:
                place.kept[self.node] = step
            if any(stops) or step % SAVE_EVERY == 0 or step == steps.total:
                await self._save(step)
            if any(stops):
                self._leave(EXIT_PREEMPTED, "asked to stop")
                return
        self._begin_phase("shutdown", steps.total, 30.0)
        await self._together(True)
        self._leave(EXIT_DONE, "")

    async def _together(self, value: Any, takes_s: float = 0.0) -> list[Any]:
        assert self._training is not None
        self._collectives, self._waiting = self._collectives + 1, True
        values = await self._training.all(self, value, takes_s)
        self._waiting = False
        return values

    async def _save(self, step: int) -> None:
        self._begin_phase("checkpoint", step, 60.0)
        await asyncio.sleep(self._place.rng.uniform(0.05, 0.5))
        if self.rank == 0:
            self._place.check_folder(self.node)
            self._count_write()
            checkpoint = self._place.folder / CHECKPOINTS / folder_name(step)
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / MANIFEST).write_text("{}")
            self._place.steps.saved = max(self._place.steps.saved, step)
        await self._together(True)

    def _saved(self) -> int:
        return newest_step(self._place.folder / CHECKPOINTS)

    def _count(self, step: int) -> None:
        if self.rank == 0:
            self._count_write()
            steps = self._place.steps
            steps.done = max(steps.done, step)
            steps.log.append((self._place.loop.time(), self.number, step))

    def _count_write(self) -> None:
        """Takes note that its generation trains; nobody else may, but one that was stopped until now."""
        now, steps = self._place.loop.time(), self._place.steps
        if now - self.thawed_s < THAWED_S:
            return
        if steps.training is not self._training:
            if steps.training is not None and steps.training.generation >= self.number:
                older = f"generation {self.number} trains after {steps.training.generation}"
                self._place.broken("one generation", older)
            steps.training = self._training
        for other in self._place.ranks:
            if (
                other.has_met
                and other._training is not self._training
                and not other.process.is_frozen
                and not other.may_stay
                and now - other.thawed_s > THAWED_S
            ):
                who = f"a rank of generation {other.number} lives on {other.node}"
                self._place.broken("one generation", f"{who} while generation {self.number} trains")

    @property
    def has_met(self) -> bool:
        """True once it may write what the run has."""
        return "restored" in self._moments

    @property
    def may_stay(self) -> bool:
        """True if the kernel does not end it and nobody waits for that: any more, or beyond a cut or a start.

        Its lock on the run folder then keeps the next rank 0 from writing.
        """
        waited_s = self._place.loop.time() - self.doomed_s
        is_cut_off = self._place.network.is_silent(self.node)
        return self.is_doomed and (waited_s > REGROUP_S or self.is_alone or is_cut_off)

    def _begin_phase(self, phase: str, step: int, limit_s: float) -> None:
        self._phase, self._step, self._limit_s = phase, step, limit_s
        self._began = self._place.loop.time()

    def look_at_lease(self) -> None:
        """Ends itself if its lease has run out; a process that is frozen does not look."""
        if not self.process.is_frozen and self._lease.has_run_out(*self._renewed, self._place.loop.time()):
            self.die()

    def _leave(self, code: int, reason: str) -> None:
        if code != EXIT_DONE:
            self._cause = ExitRecord(self.rank, self.node, code, reason, self._place.wall_time(self.node))
        self.code = code
        self.process.kill()

    def die(self) -> None:
        """Ends it as SIGKILL does: not before the kernel can."""
        if self.is_stuck:
            if not self.is_doomed:
                self.is_doomed, self.doomed_s = True, self._place.loop.time()
            return
        if self.code is None:
            self.code = -9
        self.process.kill()

    def thaw(self) -> None:
        """Lets it go on, after it was stopped or stuck."""
        self.is_stuck, self.thawed_s = False, self._place.loop.time()
        self.process.thaw()
        if self.is_doomed:
            self.die()

    def _end_now(self) -> None:
        self._place.ranks.remove(self)
        if self._training is not None:
            self._training.lose(silently=self._place.network.is_silent(self.node))
        self._look_again()

    # What its supervisor asks of it, see `RankOfGeneration`.

    @property
    def is_stopped(self) -> bool:
        return self.process.is_frozen and not self.process.is_dead

    def poll(self) -> int | None:
        return self.code

    def look(self) -> None:
        pass

    def state(self) -> RankState:
        now = self._place.loop.time()
        return RankState(
            self._phase,
            self._limit_s,
            self._step,
            self._began,
            self._collectives,
            "all_reduce",
            self._waiting,
            now=now,
        )

    def moments(self) -> Mapping[str, float]:
        return self._moments

    def request_stop(self) -> None:
        self._stop = True

    def renew_lease(self, lease_s: float) -> None:
        self._renewed = self._place.loop.time(), lease_s

    def limit_init(self, init_s: float) -> None:
        if self._phase == "init":
            self._limit_s = init_s

    def condemned(self) -> dict[str, str]:
        return {}

    def first_cause(self) -> ExitRecord | None:
        return self._cause

    def killed_hint(self, ranks: int) -> str:
        return "the kernel may have done it"

    def last_stack(self) -> str:
        return ""

    def report(self, number: int, node: str, state: RankState) -> RankReport:
        at = state.seconds, state.limit_s, state.collectives, state.collective, state.waiting
        how = "stopped by a signal" if self.process.is_frozen else "sleeping"
        return RankReport(number, node, self.pid, state.phase, state.step, *at, state=how, kernel="")

    async def python_stack(self) -> str:
        return "no Python stack: simulated"

    async def save_flight_record(self, target: Path) -> None:
        pass

    async def end(self) -> None:
        self.ending = True
        self.die()
        while self.code is None:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.02)
        self.ended = True

    def kill(self) -> None:
        self.die()

    def close(self) -> None:
        self.die()
