"""Turns the measurements of all ranks into findings that name the odd nodes. Pure, no torch."""

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence

from trainer.errors import MachineError, UnfitNode
from trainer.preflight.fabric_findings import FABRIC_CHECKS
from trainer.preflight.measurements import (
    Finding,
    Measurements,
    Needs,
    nodes_of,
    odd_node,
    pair_speeds,
    rate,
    size,
)
from trainer.sysinfo.shortage import LARGER_BY
from trainer.sysinfo.versions import unsupported
from trainer.text.wording import many

SLOW = 0.5
"""Share of the median speed below which a host or rank is an outlier."""
SLOW_GPU = 0.8
"""The same for a GPU's own speeds, which differ little between good ones; all ranks wait for the slowest."""
CLOCK_S = 2.0
"""Largest difference between clocks, in seconds; more puts log lines and causes of failure into the wrong
order.
"""
GPU_FREE = 0.9
"""Share of a GPU's memory that is free if no other process uses the GPU."""


def find_problems(measurements: Sequence[Measurements], needs: Needs) -> list[Finding]:
    """Returns the findings: errors first, then in the order of the checks."""
    findings = [
        finding
        for check in (
            _collectives,
            _nodes,
            _clocks,
            _links,
            *FABRIC_CHECKS,
            _speeds,
            _gpus,
            _cpus,
            _packages,
        )
        for finding in check(measurements, needs)
    ]
    return sorted(findings, key=lambda finding: finding.severity)


def error_of(text: str, nodes: Collection[str]) -> MachineError:
    """Returns the error that ends the start; `nodes` are those to blame, "" where it is no single one."""
    return UnfitNode(text, *nodes) if len(nodes) == 1 and "" not in nodes else MachineError(text)


def _collectives(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    by_text: dict[str, list[Measurements]] = {}
    for own in measurements:
        for text in own.wrong:
            by_text.setdefault(text, []).append(own)
    for text, affected in by_text.items():
        advice = (
            "the run would train on wrong values: run nccl-tests there, "
            "or try NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 in [env]"
        )
        text = f"{_ranks(affected)}: {text}; {advice}"
        yield Finding("error", "collectives", text, odd_node(affected, measurements))


def _nodes(measurements: Sequence[Measurements], needs: Needs) -> Iterator[Finding]:
    yield from _below(
        measurements,
        "shared memory",
        lambda r: r.shm_bytes,
        needs.shm_bytes,
        "of /dev/shm are free, but the batches that the loaders keep ready need {}: "
        f"make it larger ({LARGER_BY}), or lower data.workers",
    )
    yield from _below(
        measurements,
        "open files",
        lambda r: r.open_files,
        needs.open_files,
        "open files are allowed, but a rank may need {}: raise the limit with ulimit -n",
        unit=str,
    )
    yield from _below(
        measurements,
        "disk",
        lambda r: r.disk_bytes,
        needs.checkpoint_bytes * needs.checkpoints,
        f"are free in the run folder's file system, but {many(needs.checkpoints, 'checkpoint')} need about "
        "{}: lower checkpoint.keep, or choose another logging.runs",
        only_rank_0=True,
    )


def _below(
    measurements: Sequence[Measurements],
    check: str,
    value: Callable[[Measurements], int | None],
    needed: int,
    text: str,
    *,
    unit: Callable[[int], str] | None = None,
    only_rank_0: bool = False,
) -> Iterator[Finding]:
    """Yields one warning for all nodes that have less than needed, with the least that one of them has."""
    shown = unit or size
    short = [
        (amount, r)
        for r in measurements
        if not (only_rank_0 and r.rank) and (amount := value(r)) is not None and amount < needed
    ]
    if short:
        least = min(amount for amount, _ in short)
        yield Finding(
            "warning",
            check,
            f"{nodes_of([r for _, r in short])}: {shown(least)} {text.format(shown(needed))}",
        )


def _clocks(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    middle = statistics.median(r.clock_s for r in measurements)
    odd = {r.node: r.clock_s - middle for r in measurements if abs(r.clock_s - middle) > CLOCK_S}
    for node, off in odd.items():
        yield Finding(
            "warning",
            "clock",
            f"{node}: its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}; "
            "check that the node runs NTP",
        )


def _links(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    """Yields a warning for each node or rank whose best pair is slow.

    The best pair counts, so that a slow partner does not make it slow.
    """
    best = pair_speeds(measurements)
    if len(best) < 3:
        return
    nodes = {r.node for r in measurements}
    middle = statistics.median(best.values())
    for node_or_rank, speed in best.items():
        if speed < SLOW * middle:
            text = (
                f"{node_or_rank}: {rate(speed)} to its best partner, but the median is {rate(middle)}; "
                "check its network adapter and cable"
            )
            yield Finding("warning", "link", text, node_or_rank if len(nodes) > 1 else "")


def _speeds(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    for name, of, share, text, advice in _OF_GPUS:
        speeds = [(r, speed) for r in measurements if (speed := of(r)) is not None]
        middle = statistics.median([speed for _, speed in speeds] or [0.0])
        for r, speed in speeds:
            if speed < share * middle:
                where = (
                    f"rank {r.rank} on {r.node}: {text(speed)}, but the median is {text(middle)}; {advice}"
                )
                yield Finding("warning", name, where, odd_node([r], measurements))


def _copied(name: str) -> Callable[[Measurements], float | None]:
    return lambda r: r.timings[name].bytes_per_s if name in r.timings else None


_OF_GPUS: tuple[
    tuple[str, Callable[[Measurements], float | None], float, Callable[[float], str], str], ...
] = (
    (
        "host to device",
        _copied("host to device"),
        SLOW,
        lambda speed: f"{rate(speed)} from host to GPU",
        "check its PCIe link width",
    ),
    (
        "GPU memory",
        _copied("within the GPU"),
        SLOW_GPU,
        lambda speed: f"{rate(speed)} within the GPU",
        "another program may use it, or it is held back: check cooling and power",
    ),
    (
        "GPU products",
        lambda r: r.tflops,
        SLOW_GPU,
        lambda speed: f"{speed:,.0f} TFLOP/s of products",
        "another program may use it, or it is held back: check cooling and power",
    ),
)
"""(check, speed of a rank, share of the median below which it is an outlier, its text, advice)."""


def _gpus(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    for r in measurements:
        if r.gpu is None:
            continue
        where = f"rank {r.rank} on {r.node}, {r.gpu.name}"
        if r.gpu.uncorrected_errors:
            yield Finding(
                "warning",
                "ECC",
                f"{where}: {many(r.gpu.uncorrected_errors, 'uncorrected memory error')}; "
                "have the GPU reset or replaced",
                odd_node([r], measurements),
            )
        if r.gpu.slowed_by:
            yield Finding(
                "warning",
                "GPU clocks",
                f"{where}: slowed down by {', '.join(r.gpu.slowed_by)}; check cooling and power",
            )
        if r.gpu.other_processes:
            yield Finding(
                "warning",
                "GPU use",
                f"{where}: {many(r.gpu.other_processes, 'other process', 'other processes')} "
                f"{'uses' if r.gpu.other_processes == 1 else 'use'} it",
            )
        elif r.gpu.free_bytes < GPU_FREE * r.gpu.total_bytes:
            text = (
                f"{where}: only {size(r.gpu.free_bytes)} of {size(r.gpu.total_bytes)} are free before "
                "training; find out what uses the rest"
            )
            yield Finding("warning", "GPU memory", text)


def _cpus(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    placed = [(r, r.placement) for r in measurements if r.placement is not None and r.placement.apart]
    if placed:
        own, place = placed[0]
        text = (
            f"{_ranks([r for r, _ in placed])}: no CPU next to the GPU; rank {own.rank} has CPUs "
            f"{place.cpus}, and its GPU is {place.gpu}: let the launcher bind no rank "
            "(slurm.srun without cpu-bind, resources.bind_cpus = true), or bind each to the socket of its GPU"
        )
        yield Finding("warning", "CPUs", text)


def _packages(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    """Yields a warning for a release of open_clip that is not supported; all ranks have the same one."""
    if text := unsupported(measurements[0].open_clip):
        yield Finding("warning", "packages", text)


def _ranks(measurements: Sequence[Measurements]) -> str:
    shown = ", ".join(f"rank {r.rank} on {r.node}" for r in measurements[:4])
    return shown + (f" and {len(measurements) - 4} more" if len(measurements) > 4 else "")
