"""Checks that the collectives are right, and measures how fast they are.

Functions that measure are collective: every rank calls them, in the same order.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.comm.accelerator import on_accelerator, runtime
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
        "reduce_scatter": (
            comm.reduce_scatter(few.repeat(size, 1) + marks[rank])[0],
            size * few + sum(marks),
        ),
        "broadcast": (broadcast, ramp + marks[-1]),
        "exchange": (comm.exchange(own, partner), ramp + marks[partner]),
    }
    wrong = [
        text for name, (actual, expected) in checks.items() if (text := _difference(name, actual, expected))
    ]
    if comm.all_gather_object(rank) != list(range(size)):
        wrong.append("all_gather of objects: did not return one object of each rank")
    return tuple(wrong)


def _difference(name: str, actual: Tensor, expected: Tensor) -> str:
    if actual.shape != expected.shape:
        return f"{name}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    different = int((actual != expected).sum())
    if not different:
        return ""
    index = int((actual != expected).flatten().nonzero()[0])
    return (
        f"{name}: {different} of {actual.numel()} values are wrong, "
        f"value {index} is {float(actual[index]):g} instead of {float(expected[index]):g}"
    )


def time_collectives(
    comm: Comm, reduced_bytes: int, gathered_bytes: int, time_is_up: Callable[[], bool]
) -> dict[str, Timing]:
    """Collective: times collectives of the job's own sizes.

    These are gradients that travel together, and a rank's features. It stops before the next one when
    `time_is_up` returns True.
    """
    parts: dict[str, tuple[int, Callable[[Tensor], object]]] = {
        "latency": (_LATENCY_BYTES, comm.all_reduce),
        "all_gather": (gathered_bytes, comm.all_gather),
        "all_reduce": (reduced_bytes, comm.all_reduce),
    }
    timings: dict[str, Timing] = {}
    for name, (size, collective) in parts.items():
        if time_is_up():
            break
        tensor = torch.zeros(max(1, size // 4), device=comm.device)
        timings[name] = timing(comm, tensor.nbytes, partial(collective, tensor), time_is_up)
    comm.pop_seconds()  # measuring belongs to no step
    return timings


def time_pairs(
    comm: Comm, positions: Sequence[tuple[str, int]], size: int, time_is_up: Callable[[], bool]
) -> Mapping[str, Timing]:
    """Collective: swaps `size` bytes with ranks 1, 2, 4, ... nodes away, so that a slow one shows.

    On one node it swaps with ranks at these distances.

    `positions` is (node, local_rank) of each rank. Returns the timings by the partner's node, or "rank N" on
    one node.
    """
    timings: dict[str, Timing] = {}
    tensor = torch.zeros(max(1, size // 4), device=comm.device)
    for partners in rounds(positions):
        if time_is_up():
            break
        partner = partners[comm.world.rank]
        measured = timing(comm, tensor.nbytes, partial(comm.exchange, tensor, partner), time_is_up)
        if partner != comm.world.rank:
            timings[unit(positions, partner)] = measured
    comm.pop_seconds()
    return timings


def unit(positions: Sequence[tuple[str, int]], rank: int) -> str:
    """Returns what a slow link is blamed on: the rank's node, or the rank itself if all are on one node."""
    return positions[rank][0] if len({node for node, _ in positions}) > 1 else f"rank {rank}"


def rounds(positions: Sequence[tuple[str, int]]) -> list[list[int]]:
    """Returns the partner of each rank for each round, mutual; a rank without one is its own.

    The number of rounds is log2 of the number of units, rounded up.
    """
    nodes = list(dict.fromkeys(node for node, _ in positions))
    several = len(nodes) > 1
    units = [nodes.index(node) if several else rank for rank, (node, _) in enumerate(positions)]
    rank_at = {
        (unit, local if several else 0): rank
        for rank, (unit, (_, local)) in enumerate(zip(units, positions, strict=True))
    }
    count = len(set(units))
    steps = [1 << k for k in range(count.bit_length()) if 1 << k < count]
    return [
        [
            rank_at.get((unit ^ step, local if several else 0), rank)
            for rank, (unit, (_, local)) in enumerate(zip(units, positions, strict=True))
        ]
        for step in steps
    ]


def timing(
    comm: Comm, size: int, work: Callable[[], object], time_is_up: Callable[[], bool] = lambda: False
) -> Timing:
    """Returns the median of some repeats, after one that sets up connections; ranks begin each together.

    There are fewer repeats, but one, if time is up. Collective.
    """
    work()
    seconds: list[float] = []
    for _ in range(REPEATS):
        if seconds and time_is_up():
            break
        comm.all_gather_object(None)
        start = time.perf_counter()
        work()
        if on_accelerator(comm.device):
            runtime(comm.device).synchronize()
        seconds.append(time.perf_counter() - start)
    return Timing(size, max(statistics.median(seconds), 1e-9))
