"""Measures the cost of supervisors: `make bench-heartbeat`.

For each number of nodes the whole tree runs on this machine, one endpoint for each node with its real sockets
on loopback: the root in a process of its own, the others in a few. Then one leaf's connections break; the
news travels up and the order to end travels down. Last comes a real run of two ranks: the seconds of a step,
the time of its heartbeats in it, and the share of a core that a supervisor takes in the same steps. The last
line is JSON. BENCH_ARGS names other numbers of nodes than 125 and 1,250.
"""

import asyncio
import json
import multiprocessing as mp
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rank import MARK, cpu_s
from tests.support.jobs import tiny_job
from tests.support.start import start
from trainer.config.loader import dump_job
from trainer.supervise.machine import Machine
from trainer.supervise.messages import End, Lost, Message
from trainer.supervise.network.link import Link
from trainer.supervise.network.tree import Tree
from trainer.sysinfo.addresses import free_port
from trainer.world.rendezvous import Rendezvous

WORKERS = 4
MEASURE_S = 10.0
JOIN_S = 300.0
STEPS = 23
"""Steps of the real run; the first ones, which begin slowly, do not count."""
_AT_ONCE = 50
"""Newcomers of one worker that meet the root at the same time."""


@dataclass(frozen=True)
class Measured:
    """One size of the tree."""

    nodes: int
    join_s: float
    root_messages_per_s: float
    root_cpu: float
    others_cpu: float
    """Share of a core that all other endpoints take; a node's own share is this divided by their number."""
    detected_s: float
    ended_s: float

    def line(self) -> str:
        each = self.others_cpu / (self.nodes - 1)
        return (
            f"{self.nodes:>7} nodes: joined in {self.join_s:.1f} s; "
            f"root hears {self.root_messages_per_s:.0f} messages/s with "
            f"{self.root_cpu:.2%} of a core, another node takes {each:.3%}; "
            f"a broken leaf is known after {self.detected_s * 1e3:.0f} ms, "
            f"and all have the end after {self.ended_s * 1e3:.0f} ms"
        )


def measure(nodes: int) -> Measured:
    """The tree of so many nodes, from the first call to the end."""
    rendezvous = Rendezvous("127.0.0.1", free_port("127.0.0.1"), secrets.token_hex(16))
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    for number in range(WORKERS):
        ours, theirs = context.Pipe()
        context.Process(
            target=_worker, args=(rendezvous, range(1 + number, nodes, WORKERS), theirs), daemon=True
        ).start()
        pipes.append(ours)
    return asyncio.run(_root(rendezvous, nodes, pipes))


async def _root(rendezvous: Rendezvous, nodes: int, pipes: list[Connection]) -> Measured:
    heard = _count_received()
    tree = Tree(rendezvous, 0, "node-0", 60.0, Machine())
    lost: list[float] = []
    tree.at_root = lambda message: lost.append(time.monotonic()) if isinstance(message, Lost) else None
    begin = time.monotonic()
    await tree.join(JOIN_S)
    await _answers(pipes)
    joined = time.monotonic()
    await asyncio.sleep(2.0)
    before, cpu, wall = heard[0], time.process_time(), time.monotonic()
    for pipe in pipes:
        pipe.send("measure")
    shares = await _answers(pipes)
    wall = time.monotonic() - wall
    rate, share = (heard[0] - before) / wall, (time.process_time() - cpu) / wall
    pipes[-1].send("break")
    broken = (await _answers(pipes[-1:]))[0]
    while not lost:
        await asyncio.sleep(0.001)
    told = time.monotonic()
    tree.down(End(1))
    ends = await _answers(pipes)
    await tree.leave()
    return Measured(nodes, joined - begin, rate, share, sum(shares), lost[0] - broken, max(ends) - told)


def _count_received() -> list[int]:
    count, receive = [0], Link.receive

    async def counted(self: Link) -> Message | None:
        message = await receive(self)
        count[0] += 1
        return message

    Link.receive = counted  # type: ignore[method-assign]
    return count


async def _answers(pipes: list[Connection]) -> list[Any]:
    loop = asyncio.get_running_loop()
    return [await loop.run_in_executor(None, pipe.recv) for pipe in pipes]


def _worker(rendezvous: Rendezvous, numbers: range, pipe: Connection) -> None:
    asyncio.run(_endpoints(rendezvous, numbers, pipe))


async def _endpoints(rendezvous: Rendezvous, numbers: range, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    trees = [Tree(rendezvous, number, f"node-{number}", 60.0, Machine()) for number in numbers]
    ended: list[float] = []
    for tree in trees:
        tree.from_above = lambda message: ended.append(time.monotonic())
    for first in range(0, len(trees), _AT_ONCE):
        await asyncio.gather(*(tree.join(JOIN_S) for tree in trees[first : first + _AT_ONCE]))
    pipe.send("joined")
    await loop.run_in_executor(None, pipe.recv)
    cpu, wall = time.process_time(), time.monotonic()
    await asyncio.sleep(MEASURE_S)
    pipe.send((time.process_time() - cpu) / (time.monotonic() - wall))
    gone = 0
    if await loop.run_in_executor(None, pipe.poll, 3.0):  # the last worker is told to break one
        pipe.recv()
        pipe.send(time.monotonic())
        _break(trees[-1])
        gone = 1
    while len(ended) < len(trees) - gone:
        await asyncio.sleep(0.005)
    pipe.send(max(ended))
    await asyncio.sleep(1.0)
    os._exit(0)


def _break(tree: Tree) -> None:
    """Its connections end without a word."""
    tree.ending = True
    if tree._parent is not None:
        tree._parent.writer.transport.abort()


def one_supervisor() -> str:
    """A supervisor whose rank sleeps: its memory, and the share of a core that it takes."""
    program = (
        "import os; from trainer.supervise.limits import Limits; "
        "from trainer.supervise.supervisor import supervise; "
        "from trainer.world.launchers import World; "
        "supervise(World(0, 1, 0, 1, 'here', 'bench'), ['sleep', '20'], os.environ, Limits)"
    )
    started = _children()
    process = subprocess.Popen([sys.executable, "-c", program])
    time.sleep(2.0)
    before = cpu_s(process.pid)
    time.sleep(15.0)
    share = (cpu_s(process.pid) - before) / 15.0
    status = Path(f"/proc/{process.pid}/status").read_text()
    rss = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    process.wait()
    return (
        f"one supervisor: {int(rss) / 1024:.0f} MB, {share:.3%} of a core; "
        f"{_children() - started:.2f} s of CPU in all, its start included"
    )


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def real_steps() -> dict[str, float]:
    """Returns the seconds of a step and the shares of it that watching took.

    The figures are those of the rank whose supervisor took most.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = tiny_job(
            name="watched",
            model={"name": "ViT-S-32-alt"},
            data={"workers": 1, "synthetic_samples": 1024},
            optim={"global_batch_size": 32, "steps": STEPS},
            comm={"launcher": "clipship"},
            logging={"runs": folder},
        )
        path = Path(folder, "job.toml")
        path.write_text(dump_job(job))
        os.environ["PYTHONPATH"] = str(
            Path(__file__).parents[1]
        )  # a supervisor starts its rank without the working folder
        done = start("torch", "clipship", 2, "benchmarks.rank", str(path))
    if done.returncode:
        sys.exit(f"the real run failed:\n{done.stdout}{done.stderr}")
    found: list[dict[str, float]] = [
        json.loads(line.partition(MARK)[2]) for line in done.stdout.splitlines() if MARK in line
    ]
    worst = max(found, key=lambda rank: rank["supervisor_cpu_s"])
    shares = {
        "heartbeat_share": "heartbeat_s",
        "monitoring_share": "monitoring_s",
        "supervisor_share": "supervisor_cpu_s",
    }
    return {**worst, **{share: worst[seconds] / worst["step_s"] for share, seconds in shares.items()}}


def main(sizes: list[int]) -> None:
    print(f"{os.cpu_count()} cores, {WORKERS + 1} processes")
    trees = []
    for nodes in sizes:
        trees.append(measure(nodes))
        print(trees[-1].line(), flush=True)
    print(one_supervisor())
    cost = real_steps()
    print(
        f"a real step of {cost['step_s']:.3f} s: {cost['heartbeats']:.0f} heartbeats take "
        f"{cost['heartbeat_share']:.4%} of it, "
        f"the supervisor {cost['supervisor_share']:.4%} of a core meanwhile, "
        f"monitoring with a record every 10 steps {cost['monitoring_share']:.4%}"
    )
    print(json.dumps({"step": cost, "trees": [asdict(tree) for tree in trees]}))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [125, 1250])
