"""Simulates the loss of a node in a large run: `make bench-generations`.

Real supervisors with stub ranks, eight on each node, meet on loopback in a few processes: their tree, their
messages and their decisions are those of a run. One node is lost, and the time is taken until all that are
left have the ranks of the same new world. Then follow the bytes and seconds of what a run of that size
writes and gathers: `ranks.jsonl`, logs, the preflight's comparisons, the facts and the steps in memory that
its ranks exchange at a start. At last real ranks of torch meet, fewer of them, and their connections are
counted. The last line is JSON; the exit code is 1 if a figure misses its limit, which stderr says.
BENCH_ARGS names other numbers of nodes than 125 and 1,250.
"""

import asyncio
import json
import math
import multiprocessing as mp
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.at_scale import (
    Logged,
    Started,
    Written,
    logged_at_scale,
    started_at_scale,
    written_at_scale,
)
from benchmarks.meeting import Met, meet
from tests.support.stub_world import LIMITS, StubWorld, until
from trainer.supervise import supervisor as supervisor_module
from trainer.supervise.messages import Beat, Message, to_line
from trainer.supervise.network import tree
from trainer.supervise.network.link import Link

WORKERS = 4
RANKS_PER_NODE = 8
_AT_ONCE = 20
"""Supervisors of one process that join at the same time."""
_LIMIT_S = 600.0
AGREED_S = 20.0
"""Longest time until all agree on the new world."""
OPEN_FILES = 4096
"""Most files that the coordinator's process may open; it has a connection to each node."""
_MEETINGS = (8, 16, 32)
"""Numbers of real ranks that meet."""
_PEERS_FACTOR = 3
"""Most sockets of a rank where gloo connects when needed, as a multiple of the logarithm of all ranks."""


@dataclass(frozen=True)
class Lost:
    """One size of the run, and what the loss of one node took."""

    nodes: int
    ranks: int
    joined_s: float
    agreed_s: float
    """Seconds from the loss until the last supervisor has the rank of the new world."""
    root_messages: int
    """Messages that the coordinator received meanwhile, heartbeats left out."""
    root_received_bytes: int
    root_sent_bytes: int
    root_open_files: int

    def line(self) -> str:
        """Returns the figures as a line for people."""
        return (
            f"{self.ranks:>7} ranks on {self.nodes} nodes: joined in {self.joined_s:.1f} s; one node lost: "
            f"all agree after {self.agreed_s:.1f} s, the coordinator has {self.root_open_files} open files, "
            f"hears {self.root_messages} messages of {self.root_received_bytes / 1e3:.0f} kB and sends "
            f"{self.root_sent_bytes / 1e3:.0f} kB"
        )


def lose_a_node(nodes: int) -> Lost:
    """Starts the run, loses one node, and measures."""
    folder = Path(tempfile.mkdtemp(prefix="clipship-generations-"))
    names = [f"node-{member // RANKS_PER_NODE}" for member in range(nodes * RANKS_PER_NODE)]
    try:
        return _simulate(names, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _simulate(names: list[str], folder: Path) -> Lost:
    context = mp.get_context("fork")
    world = _world(names, folder)
    pipes: list[Connection] = []
    for number in range(WORKERS):
        ours, theirs = context.Pipe()
        mine = [member for member in range(1, len(names)) if member % WORKERS == number]
        context.Process(target=_worker, args=(world, mine, theirs), daemon=True).start()
        pipes.append(ours)
    return asyncio.run(_coordinate(world, pipes))


def _world(names: list[str], folder: Path) -> StubWorld:
    _relax()
    sizes = tuple(range(1, len(names) + 1))
    limits = replace(LIMITS, silence_s=120.0, init_s=_LIMIT_S, min_nodes=1, world_sizes=sizes)
    return StubWorld(names, folder, limits)


def _relax() -> None:
    """Lets processes that stand for many machines look at stub ranks less often and answer more slowly."""
    supervisor_module.TICK_S = 10.0
    supervisor_module.HELD_UP_S = 1e9
    tree.HANDSHAKE_S = tree.REJOIN_CALL_S = 120.0
    tree.HEARTBEAT_S = 20.0  # what heartbeats cost, benchmarks.heartbeat measures
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _coordinate(world: StubWorld, pipes: list[Connection]) -> Lost:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))  # the workers stand for many processes
    counts = _count()
    began = time.monotonic()
    first = world.begin(0)
    await _answers(pipes)
    total = len(world.nodes)
    while (its := first.coordinator) is None or len(its.members) < total:
        await asyncio.sleep(0.05)
    joined = time.monotonic() - began
    await asyncio.sleep(5.0)  # the roster travels
    counts.clear()
    lost = {member for member, name in enumerate(world.nodes) if name == "node-1"}
    for pipe in pipes:
        pipe.send(lost)
    began = time.monotonic()
    ends = await _answers(pipes)
    await until(lambda: first.rank is not None and first.rank.number >= 2)
    figures = dict(counts)
    for pipe in pipes:
        pipe.send("end")
    return Lost(
        total // RANKS_PER_NODE,
        total,
        joined,
        max(ends) - began,
        figures["messages"],
        figures["received"],
        figures["sent"],
        len(os.listdir("/proc/self/fd")),
    )


def _count() -> Counter[str]:
    """Counts what this process, which is the coordinator's, receives and sends from now on."""
    counts: Counter[str] = Counter()
    receive, send = Link.receive, Link.send_line

    async def counted(self: Link) -> Message | None:
        message = await receive(self)
        if message is not None and not isinstance(message, Beat):
            counts["messages"] += 1
            counts["received"] += len(to_line(message))
        return message

    def sent(self: Link, line: bytes) -> None:
        counts["sent"] += len(line)
        send(self, line)

    Link.receive, Link.send_line = counted, sent  # type: ignore[method-assign]
    return counts


async def _answers(pipes: list[Connection]) -> list[Any]:
    loop = asyncio.get_running_loop()
    return [await loop.run_in_executor(None, pipe.recv) for pipe in pipes]


def _worker(world: StubWorld, members: list[int], pipe: Connection) -> None:
    asyncio.run(_members(world, members, pipe))


def _all_have_parents(places: Sequence[Any]) -> bool:
    return all(place is not None and place._parent for place in places)


async def _members(world: StubWorld, members: list[int], pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    for first in range(0, len(members), _AT_ONCE):
        nodes = [world.begin(member) for member in members[first : first + _AT_ONCE]]
        places = [node.tree for node in nodes]
        await until(partial(_all_have_parents, places), 0.05)
    pipe.send("joined")
    lost = await loop.run_in_executor(None, pipe.recv)
    world.lose(*(lost & world.members.keys()))
    await until(_all_in(world, len(world.nodes) - len(lost)), 0.1)
    pipe.send(time.monotonic())
    await loop.run_in_executor(None, pipe.recv)
    os._exit(0)


def _all_in(world: StubWorld, size: int) -> Any:
    """Returns a function that says whether all supervisors here have a rank in a world of that size."""
    waiting = set(world.members)

    def done() -> bool:
        for member in list(waiting):
            rank = world.members[member].rank
            if rank is not None and rank.env.get("CLIPSHIP_RANKS") == str(size):
                waiting.discard(member)
        return not waiting

    return done


def missed(lost: Sequence[Lost], met: Sequence[Met]) -> list[str]:
    """Returns a sentence for each limit that a figure misses."""
    found = []
    for each in lost:
        if each.agreed_s >= AGREED_S:
            found.append(f"{each.ranks} ranks agree after {each.agreed_s:.1f} s, not within {AGREED_S:g} s")
    for met_ranks in met:
        most = round(_PEERS_FACTOR * math.log2(met_ranks.ranks))
        if met_ranks.lazy and met_ranks.others_sockets > most:
            found.append(
                f"of {met_ranks.ranks} ranks that connect when they first talk, one has "
                f"{met_ranks.others_sockets} sockets, more than {most}"
            )
    return found


def main(sizes: list[int]) -> None:
    """Prints a line for each number of nodes, and the figures as JSON last."""
    print(f"{os.cpu_count()} cores, {WORKERS + 1} processes, {RANKS_PER_NODE} supervisors a node")
    lost = []
    for nodes in sizes:
        lost.append(lose_a_node(nodes))
        print(lost[-1].line(), flush=True)
    nodes, ranks = sizes[-1], sizes[-1] * RANKS_PER_NODE
    parts: dict[str, Written | Logged | Started] = {
        "written": written_at_scale(nodes, RANKS_PER_NODE),
        "logged": logged_at_scale(ranks),
        "started": started_at_scale(nodes, RANKS_PER_NODE),
    }
    for part in parts.values():
        print(part.line(), flush=True)
    met = []
    for size in _MEETINGS:
        for lazy in (False, True):
            met.append(meet(size, lazy=lazy))
            print(met[-1].line(), flush=True)
    sentences = missed(lost, met)
    report = {
        "lost": [asdict(each) for each in lost],
        **{name: asdict(part) for name, part in parts.items()},
        "met": [asdict(each) for each in met],
        "missed": sentences,
    }
    print(json.dumps(report), flush=True)
    if sentences:
        sys.exit("\n".join(sentences))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [125, 1250])
