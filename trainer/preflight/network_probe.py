"""Checks that the collectives are right, and measures how fast they are.

Every function here is collective unless it says otherwise: every rank calls it, in the same order.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.comm.protocol import Comm
from trainer.preflight.measurements import Timing

REPEATS = 5
_ELEMENTS = 1 << 16  # 256 KiB of float32, more than any packet
_FEW = 1 << 10
_LATENCY_BYTES = 8


def wrong_collectives(comm: Comm) -> tuple[str, ...]:
    """Collective: runs each collective on known values and returns those that went wrong.

    Every rank can compute the values itself.
    """
    size, rank = comm.world.size, comm.world.rank
    ramp = torch.arange(_ELEMENTS, dtype=torch.float32, device=comm.device) % 251
    marks = [other % 7 for other in range(size)]  # so float32 holds sums over 10,000 ranks exactly
    own, few = ramp + marks[rank], ramp[:_FEW]
    broadcast = own.clone()
    comm.broadcast_(broadcast, size - 1)
    partner = size - 1 - rank  # in an odd world the middle rank is its own partner
    checks = {
        "all_reduce": (comm.all_reduce(own), size * ramp + sum(marks)),
        "all_gather": (comm.all_gather(own[:_FEW]), torch.cat([few + mark for mark in marks])),
        "broadcast": (broadcast, ramp + marks[-1]),
        "exchange": (comm.exchange(own, partner), ramp + marks[partner]),
    }
    wrong = [text for name, (got, due) in checks.items() if (text := _difference(name, got, due))]
    if comm.all_gather_object(rank) != list(range(size)):
        wrong.append("all_gather of objects: did not return one object of each rank")
    return tuple(wrong)


def _difference(name: str, got: Tensor, due: Tensor) -> str:
    if got.shape != due.shape:
        return f"{name}: shape {tuple(got.shape)} instead of {tuple(due.shape)}"
    different = int((got != due).sum())
    if not different:
        return ""
    place = int((got != due).flatten().nonzero()[0])
    return (
        f"{name}: {different} of {got.numel()} values are wrong, "
        f"value {place} is {float(got[place]):g} instead of {float(due[place]):g}"
    )


def time_collectives(
    comm: Comm, reduced_bytes: int, gathered_bytes: int, enough: Callable[[], bool]
) -> dict[str, Timing]:
    """Collective: times collectives of the job's own sizes.

    These are gradients that travel together, and a rank's features. It stops before the next one when
    `enough` returns True.
    """
    parts: dict[str, tuple[int, Callable[[Tensor], object]]] = {
        "latency": (_LATENCY_BYTES, comm.all_reduce),
        "all_gather": (gathered_bytes, comm.all_gather),
        "all_reduce": (reduced_bytes, comm.all_reduce),
    }
    timings: dict[str, Timing] = {}
    for name, (size, collective) in parts.items():
        if enough():
            break
        tensor = torch.zeros(max(1, size // 4), device=comm.device)
        timings[name] = timing(comm, tensor.nbytes, partial(collective, tensor))
    comm.pop_seconds()  # measuring belongs to no step
    return timings


def time_pairs(
    comm: Comm, places: Sequence[tuple[str, int]], size: int, enough: Callable[[], bool]
) -> Mapping[str, Timing]:
    """Collective: swaps `size` bytes with ranks 1, 2, 4, ... nodes away, so that a slow one shows.

    On one node it swaps with ranks at these distances.

    `places` is (node, local_rank) of each rank. Returns the timings by the partner's node, or "rank N" on one
    node.
    """
    timings: dict[str, Timing] = {}
    tensor = torch.zeros(max(1, size // 4), device=comm.device)
    for partners in rounds(places):
        if enough():
            break
        partner = partners[comm.world.rank]
        found = timing(comm, tensor.nbytes, partial(comm.exchange, tensor, partner))
        if partner != comm.world.rank:
            timings[unit(places, partner)] = found
    comm.pop_seconds()
    return timings


def unit(places: Sequence[tuple[str, int]], rank: int) -> str:
    """Returns what a slow link is blamed on: the rank's node, or the rank itself if all are on one node."""
    return places[rank][0] if len({node for node, _ in places}) > 1 else f"rank {rank}"


def rounds(places: Sequence[tuple[str, int]]) -> list[list[int]]:
    """Returns the partner of each rank for each round, mutual; a rank without one is its own.

    The number of rounds is log2 of the number of units, rounded up.
    """
    nodes = list(dict.fromkeys(node for node, _ in places))
    several = len(nodes) > 1
    units = [nodes.index(node) if several else rank for rank, (node, _) in enumerate(places)]
    seats = {
        (unit, local if several else 0): rank
        for rank, (unit, (_, local)) in enumerate(zip(units, places, strict=True))
    }
    count = len(set(units))
    steps = [1 << k for k in range(count.bit_length()) if 1 << k < count]
    return [
        [
            seats.get((unit ^ step, local if several else 0), rank)
            for rank, (unit, (_, local)) in enumerate(zip(units, places, strict=True))
        ]
        for step in steps
    ]


def timing(comm: Comm, size: int, work: Callable[[], object]) -> Timing:
    """Returns the median of some repeats, after one that sets up connections; ranks begin each together.

    Collective.
    """
    work()
    seconds = []
    for _ in range(REPEATS):
        comm.all_gather_object(None)
        start = time.perf_counter()
        work()
        if comm.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Timing(size, max(statistics.median(seconds), 1e-9))


def time_copy(device: torch.device, size: int = 1 << 26) -> Timing | None:
    """Times copies of `size` bytes from pinned host memory to the GPU; None without a GPU. Not collective."""
    if device.type != "cuda":
        return None
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        host.to(device)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Timing(size, max(statistics.median(seconds), 1e-9))
