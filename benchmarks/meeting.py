"""Connections and seconds of ranks that meet: real ranks of torch over gloo, all on this machine.

Part of `make bench-generations`. gloo connects each rank with every other when they meet, or two ranks when
they first talk to each other (TORCH_GLOO_LAZY_INIT), as the backend asks it to in a large world.
"""

import itertools
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.support.jobs import tiny_job
from trainer.comm.torch_backend import LAZY, TorchBackend
from trainer.sysinfo.addresses import free_port
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

_WAIT_S = 120.0


@dataclass(frozen=True)
class Met:
    """Ranks of one size of the world that have met, and used each kind of collective once."""

    ranks: int
    lazy: bool
    met_s: float
    """Seconds until the last rank has met the others."""
    first_s: float
    """Seconds of the collectives of a start, which may connect ranks."""
    again_s: float
    """Seconds of one gather and one small sum afterwards."""
    rank_0_sockets: int
    """Sockets of rank 0, with those of the store, to which every rank connects."""
    others_sockets: int
    """Most sockets of another rank."""

    def line(self) -> str:
        """Returns the figures as a line for people."""
        how = "when they first talk" if self.lazy else "each with each"
        return (
            f"{self.ranks:>7} ranks of torch connect {how}: met in {self.met_s:.2f} s, the first collectives "
            f"take {self.first_s:.2f} s, later ones {self.again_s:.3f} s; rank 0 has {self.rank_0_sockets} "
            f"sockets, any other at most {self.others_sockets}"
        )


def meet(ranks: int, *, lazy: bool) -> Met:
    """Lets so many ranks meet in processes of their own, and measures."""
    context = get_context("fork")
    pipes, processes = [], []
    port = free_port("127.0.0.1")
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, ranks, port, lazy, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    rows = [pipe.recv() if pipe.poll(_WAIT_S) else None for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    if None in rows:
        raise TimeoutError(f"not all of {ranks} ranks met in {_WAIT_S:g} s")
    return _most(ranks, lazy, [row for row in rows if row is not None])


def _most(ranks: int, lazy: bool, rows: Sequence[Sequence[float]]) -> Met:
    met_s, first_s, again_s = (max(row[column] for row in rows) for column in range(3))
    sockets = [int(row[3]) for row in rows]
    return Met(ranks, lazy, met_s, first_s, again_s, sockets[0], max(sockets[1:]))


def _rank(rank: int, ranks: int, port: int, lazy: bool, pipe: Connection) -> None:
    """Meets the others, calls each collective once, and tells seconds and sockets."""
    torch.set_num_threads(1)
    os.environ.pop(LAZY, None)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), **({LAZY: "1"} if lazy else {})}
    os.environ.update({**where, **own})
    before, moments = _sockets(), [time.monotonic()]
    world = World(rank, ranks, rank, ranks, "here", "torchrun")
    comm = TorchBackend(tiny_job(), world, torch.device("cpu"), Heartbeat.open({}))
    moments.append(time.monotonic())
    _all_collectives(comm, rank)
    moments.append(time.monotonic())
    comm.all_gather_object(rank)
    comm.start_all_reduce(torch.zeros(8))()
    moments.append(time.monotonic())
    comm.barrier(_WAIT_S)
    pipe.send([*(end - begin for begin, end in itertools.pairwise(moments)), _sockets() - before])
    time.sleep(_WAIT_S)  # until it is killed: one that leaves would disturb the others


def _all_collectives(comm: Any, rank: int) -> None:
    comm.all_gather_object({"rank": rank, "text": "x" * 1000})
    comm.broadcast_object(rank)
    comm.broadcast_(torch.zeros(1000))
    comm.start_all_reduce(torch.zeros(8))()
    comm.all_reduce(torch.zeros(1 << 16))
    comm.all_gather(torch.zeros(1, 64))


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            count += stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
    return count
