"""Real supervisors with stub ranks, many in one process: they meet on loopback, and each may be lost."""

import asyncio
import mmap
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.stub_supervisor import restarts_in
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine
from trainer.supervise.network.tree import Tree
from trainer.supervise.rank.generation import RankOfGeneration
from trainer.supervise.supervisor import Supervisor
from trainer.sysinfo.addresses import free_port
from trainer.world import launchers
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World
from trainer.world.rendezvous import Rendezvous

LIMITS = Limits(
    init_s=20.0, silence_s=60.0, max_restarts=20, backoff_s=0.0, world_sizes=tuple(range(1, 20_000))
)


@dataclass
class StubProcess:
    """Process of a stub rank: only its end counts."""

    code: int | None = None
    pid: int = 2**22 + 1
    """Above every process number, so that nothing real is ever killed."""

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int | None:
        return self.code


class StubGeneration(RankOfGeneration):
    """Rank that computes nothing, in a process that is none."""

    def __init__(self, number: int, *, env: Mapping[str, str], is_root: bool) -> None:
        self.number, self.env, self.is_root = number, env, is_root
        self.reported_end = self.reported_late = self.report_requested = self.ending = self.ended = False
        self.rank: Any = StubProcess()
        self.folder, self.seen_kb, self._others_kb = Path("/nonexistent"), 0, 0
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.heartbeat = Heartbeat(self.memory, {})
        self.heartbeat.begin_phase("step", 5)

    async def end(self) -> None:
        self.ending = True
        await asyncio.sleep(0)
        self.close()

    def close(self) -> None:
        self.rank.code, self.ended = -9, True

    @property
    def place(self) -> World:
        """Place that the rank finds in its environment."""
        return launchers.detect(self.env, "here")

    def fail(self) -> None:
        """Ends as a rank does that somebody killed."""
        self.rank.code = -9


@dataclass
class Node:
    """One supervisor of the stub world, with its task."""

    member: int
    supervisor: Supervisor
    task: "asyncio.Task[int]"

    @property
    def rank(self) -> StubGeneration | None:
        """Stub rank as it runs now; None if there is none or it has ended."""
        generation: Any = self.supervisor.generation
        return None if generation is None or generation.ended else generation

    @property
    def coordinator(self) -> Coordinator | None:
        """The run's coordinator, if it is here."""
        return self.supervisor._host.coordinator

    @property
    def tree(self) -> Tree | None:
        """Connections of the supervisor."""
        return self.supervisor._context.tree


@dataclass
class StubWorld:
    """All supervisors of one start; `members` are those that live."""

    nodes: Sequence[str]
    """Node of each supervisor, in the order of their numbers."""
    folder: Path
    limits: Limits = LIMITS
    spares: int = 0
    respawns: bool = False
    launcher: str = "CLIPSHIP_KEEPS_GOING"
    """What the launcher does when one is gone, as a variable."""
    members: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rendezvous = Rendezvous("127.0.0.1", free_port("127.0.0.1"), secrets.token_hex(16))
        self.limits = replace(self.limits, run_folder=str(self.folder))
        self._on_node = Counter(self.nodes)
        self._first_of = {node: number for number, node in reversed(list(enumerate(self.nodes)))}

    def begin(self, member: int, *, again: str = "") -> Node:
        """Starts a supervisor; `again`: in the place of a lost one, as so many a try."""
        node = self.nodes[member]
        lowest, each = self._first_of[node], self._on_node[node]
        world = World(member, len(self.nodes), member - lowest, each, node, "clipship run")
        env = {
            **self.rendezvous.variables(),
            self.launcher: "1",
            "CLIPSHIP_SPARE_NODES": str(self.spares),
            "CLIPSHIP_STARTED_HERE": "1",
            "RANK": str(member),
            "WORLD_SIZE": str(len(self.nodes)),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.local_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            **({"CLIPSHIP_RESPAWNS": "1"} if self.respawns else {}),
            **({"CLIPSHIP_RESPAWNED": again} if again else {}),
        }

        def start(number: int, env: Mapping[str, str], is_root: bool) -> StubGeneration:
            return StubGeneration(number, env={**env, "CLIPSHIP_GENERATION": str(number)}, is_root=is_root)

        first = None if again else launchers.first_world(world, env)
        generation: Any = None if first is None else start(1, env, first.rank == 0)
        starter: Any = start
        supervisor = Supervisor(world, generation, starter, self.limits, env, Machine())
        self.members[member] = Node(member, supervisor, asyncio.ensure_future(supervisor.run()))
        return self.members[member]

    async def start(self) -> None:
        """Starts all and waits until the coordinator knows them."""
        for member in range(len(self.nodes)):
            self.begin(member)
        await until(lambda: self.knows(len(self.nodes)))

    def knows(self, members: int) -> bool:
        """Returns whether every living supervisor has a roster of so many members."""
        rosters = [
            node.supervisor._parent_loss.roster for node in self.members.values() if not node.coordinator
        ]
        return all(roster is not None and len(roster.members) == members for roster in rosters)

    def lose(self, *members: int) -> None:
        """Ends supervisors as SIGKILL does: their connections close, and their ranks end."""
        for member in members:
            node = self.members.pop(member)
            tree = node.tree
            assert tree is not None
            tree.ending = True
            for link in [*tree._children, *([tree._parent] if tree._parent else [])]:
                link.writer.transport.abort()
            for server in tree._servers.values():
                server.close()
            for task in [*tree._tasks, *node.supervisor._context.tasks, node.task]:
                task.cancel()
            if node.coordinator is not None:
                node.coordinator.close()

    def fail(self, member: int) -> None:
        """Ends the rank of a supervisor, which stays."""
        rank = self.members[member].rank
        assert rank is not None
        rank.fail()

    def restarts(self) -> list[dict[str, Any]]:
        """Returns those that the run folder tells of."""
        return restarts_in(self.folder)

    def world(self) -> dict[int, int]:
        """Returns the rank of each living supervisor that has one."""
        return {
            node.member: int(node.rank.env.get("CLIPSHIP_RANK", node.member))
            for node in self.members.values()
            if node.rank is not None
        }

    async def agreed(self, generation: int, size: int) -> None:
        """Waits until exactly `size` ranks of this generation run, numbered from 0."""

        def is_so() -> bool:
            ranks = [node.rank for node in self.members.values() if node.rank is not None]
            return (
                len(ranks) == size
                and all(rank.number == generation for rank in ranks)
                and sorted(self.world().values()) == list(range(size))
            )

        await until(is_so)

    async def codes(self) -> list[int]:
        """Waits for the end; returns the exit codes of the supervisors."""
        return await asyncio.gather(*(node.task for node in self.members.values()))

    async def end(self) -> list[int]:
        """Lets all ranks be done; returns the exit codes of the supervisors."""
        for node in self.members.values():
            if node.rank is not None:
                node.rank.rank.code = 0
        return await self.codes()


async def until(condition: Callable[[], object], step_s: float = 0.02) -> None:
    while not condition():
        await asyncio.sleep(step_s)


async def four_nodes(folder: Path, **keys: Any) -> StubWorld:
    """Starts eight supervisors on four nodes."""
    world = StubWorld([f"n{member // 2}" for member in range(8)], folder, **keys)
    await world.start()
    return world
