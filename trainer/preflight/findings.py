"""Turns the measurements of all ranks into findings that name the odd nodes. Pure, no torch."""

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence

from trainer.config.fabric_rates import slowest_adapter_gb_s
from trainer.config.fabrics import FABRICS
from trainer.errors import MachineError, UnfitNode
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
            *_FABRIC_CHECKS,
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
        shown=str,
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
    shown: Callable[[int], str] = size,
    only_rank_0: bool = False,
) -> Iterator[Finding]:
    """Yields one warning for all nodes that have less than needed, with the least that one of them has."""
    short = [
        (amount, r)
        for r in measurements
        if not (only_rank_0 and r.rank) and (amount := value(r)) is not None and amount < needed
    ]
    if short:
        least = min(amount for amount, _ in short)
        where = nodes_of([r for _, r in short])
        yield Finding("warning", check, f"{where}: {shown(least)} {text.format(shown(needed))}")


def _clocks(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    middle = statistics.median(r.clock_s for r in measurements)
    odd = {r.node: r.clock_s - middle for r in measurements if abs(r.clock_s - middle) > CLOCK_S}
    for node, off in odd.items():
        apart = f"{abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
        text = f"{node}: its clock is {apart}; check that the node runs NTP"
        yield Finding("warning", "clock", text)


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
        if errors := r.gpu.uncorrected_errors:
            text = f"{where}: {many(errors, 'uncorrected memory error')}; have the GPU reset or replaced"
            yield Finding("warning", "ECC", text, odd_node([r], measurements))
        if r.gpu.slowed_by:
            text = f"{where}: slowed down by {', '.join(r.gpu.slowed_by)}; check cooling and power"
            yield Finding("warning", "GPU clocks", text)
        if others := r.gpu.other_processes:
            use = f"{many(others, 'other process', 'other processes')} {'uses' if others == 1 else 'use'} it"
            yield Finding("warning", "GPU use", f"{where}: {use}")
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


OF_ADAPTER = 0.25
"""Share of one adapter's rate below which nodes do not seem to use the fabric that the job says they have."""
LOCKED_BYTES = 1 << 30
"""Locked memory below which RDMA of one rank may fail: 32 channels of NCCL to and from a few other ranks,
each with buffers of 4 MiB (NCCL_BUFFSIZE)."""

_RDMA_ADVICE = (
    "a container needs /dev/infiniband ([kubernetes] rdma, docker --device) and libibverbs, EFA also the "
    "plugin "
    'aws-ofi-nccl; env.NCCL_DEBUG = "INFO" shows what NCCL tried'
)


def _rdma(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    """Yields warnings for nodes whose NCCL opened no RDMA device.

    Nodes that all fell back to TCP are equally slow, so only their own devices show it.
    """
    idle = [r for r in measurements if r.rdma is not None and not r.rdma.opened]
    if len({r.node for r in measurements}) < 2 or not idle:
        return
    by_cause: dict[str, list[Measurements]] = {}
    for r in idle:
        by_cause.setdefault(r.rdma.refused_by if r.rdma else "", []).append(r)
    for variable, affected in by_cause.items():
        devices = affected[0].rdma.devices if affected[0].rdma else ()
        shown = ", ".join(devices[:3]) + (f" and {len(devices) - 3} more" if len(devices) > 3 else "")
        advice = f"{variable} makes it do so: remove that setting" if variable else _RDMA_ADVICE
        text = f"{nodes_of(affected)}: NCCL uses TCP instead of the node's {shown}; {advice}"
        yield Finding("warning", "RDMA", text, "" if variable else odd_node(idle, measurements))


def _locked_memory(measurements: Sequence[Measurements], needs: Needs) -> Iterator[Finding]:
    """Yields a warning for nodes whose ranks may lock too little memory for RDMA."""
    by_job = needs.fabric is not None and FABRICS[needs.fabric].rdma
    short = [
        r
        for r in measurements
        if (by_job or r.rdma) and r.locked_bytes is not None and r.locked_bytes < LOCKED_BYTES
    ]
    if not short or len({r.node for r in measurements}) < 2:
        return
    least = min(r.locked_bytes or 0 for r in short)
    yield Finding(
        "warning",
        "locked memory",
        f"{nodes_of(short)}: a rank may lock {size(least)} of memory, but RDMA needs more: raise the limit "
        "of slurmd or of the nodes' container runtime (LimitMEMLOCK=infinity), or on Kubernetes set "
        "run_as_user = 0",
        odd_node(short, measurements),
    )


def _fabric(measurements: Sequence[Measurements], needs: Needs) -> Iterator[Finding]:
    """Yields a warning if nodes do not use the fabric that the job says they have.

    What is expected comes from the fabric, since nodes that all fell back to TCP differ in nothing.
    """
    if needs.fabric is None or len({r.node for r in measurements}) < 2:
        return
    said = f'resources.fabric = "{needs.fabric}"'
    if FABRICS[needs.fabric].rdma:
        if without := [r for r in measurements if r.rdma is None]:
            text = f"{said}, but no active adapter is visible, so NCCL uses TCP; {_RDMA_ADVICE}"
            named = f"{nodes_of(without)}: {text}"
            yield Finding("warning", "fabric", named, odd_node(without, measurements))
            return
        if any(r.rdma and not r.rdma.opened for r in measurements):
            return  # `_rdma` names them
    speeds = pair_speeds(measurements)
    middle = statistics.median(speeds.values()) if speeds else None
    expected = _expected(measurements, needs.fabric)
    if middle is not None and middle < OF_ADAPTER * expected:
        yield Finding(
            "warning",
            "fabric",
            f"{nodes_of(measurements)}: {said}, but the median node reaches {rate(middle)}, and one adapter "
            f'alone carries {rate(expected)}; env.NCCL_DEBUG = "INFO" shows which network NCCL uses',
        )


def _expected(measurements: Sequence[Measurements], fabric: str) -> float:
    """Returns the bytes per second that one adapter of every node carries.

    RDMA adapters say their speed themselves; that of others comes from the table of rates.
    """
    if FABRICS[fabric].rdma:
        return min(_adapter_speed(r) for r in measurements)
    return slowest_adapter_gb_s(fabric) * 1e9


def _adapter_speed(own: Measurements) -> float:
    """Returns the bytes per second of the node's fastest adapter."""
    return max(float(device.split()[-2]) for device in own.rdma.devices) * 1e9 / 8 if own.rdma else 0.0


_FABRIC_CHECKS = (_rdma, _fabric, _locked_memory)
"""Checks in the order in which their findings are shown."""
