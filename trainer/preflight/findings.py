"""Turns the measurements of all ranks into findings that name the odd nodes. Pure, no torch."""

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.config.fabrics import FABRICS
from trainer.errors import MachineError, UnfitNode
from trainer.preflight.measurements import Finding, Measurements
from trainer.text.wording import many

SLOW = 0.5
"""Share of the median speed below which a host or rank is an outlier."""
CLOCK_S = 2.0
"""Largest difference between clocks, in seconds; more puts log lines and causes of failure into the wrong
order.
"""
OF_ADAPTER = 0.25
"""Share of one adapter's rate below which nodes that say they have an RDMA fabric do not seem to use it."""
GPU_FREE = 0.9
"""Share of a GPU's memory that is free if no other process uses the GPU."""


_RDMA_ADVICE = (
    "a container needs /dev/infiniband ([kubernetes] rdma, docker --device) and libibverbs, EFA also the "
    "plugin "
    'aws-ofi-nccl; comm.nccl.debug = "INFO" shows what NCCL tried'
)


@dataclass(frozen=True)
class Needs:
    """Estimate of what the job needs on each node."""

    shm_bytes: int
    """Bytes of batches on their way from loader processes to ranks."""
    open_files: int
    checkpoint_bytes: int
    checkpoints: int
    """Number of checkpoints that are kept at once, with the one that is being written."""
    fabric: str | None = None
    """Network that the job says its nodes have; None if it does not say, or computes on CPUs."""


def find_problems(measurements: Sequence[Measurements], needs: Needs) -> list[Finding]:
    """Returns the findings: errors first, then in the order of the checks."""
    findings = [
        finding
        for check in (_collectives, _nodes, _clocks, _links, _rdma, _fabric, _copies, _gpus)
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
        "raise docker run --shm-size or [kubernetes] shm_gb, or lower data.workers",
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
            f"{_nodes_of([r for _, r in short])}: {shown(least)} {text.format(shown(needed))}",
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


def pair_speeds(measurements: Sequence[Measurements]) -> dict[str, float]:
    """Returns bytes per second of each node in its best pair, summed over its ranks.

    On a single node it returns those of each rank.
    """
    several = len({r.node for r in measurements}) > 1
    speeds: dict[str, dict[str, float]] = {}
    for r in measurements:
        by_partner = speeds.setdefault(r.node if several else f"rank {r.rank}", {})
        for partner, timing in r.pairs.items():
            by_partner[partner] = by_partner.get(partner, 0.0) + timing.bytes_per_s
    return {
        node_or_rank: max(by_partner.values()) for node_or_rank, by_partner in speeds.items() if by_partner
    }


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
        text = f"{_nodes_of(affected)}: NCCL uses TCP instead of the node's {shown}; {advice}"
        yield Finding("warning", "RDMA", text, "" if variable else odd_node(idle, measurements))


def _fabric(measurements: Sequence[Measurements], needs: Needs) -> Iterator[Finding]:
    """Yields a warning if nodes do not use the RDMA fabric that the job says they have.

    What is expected comes from the fabric, since nodes that all fell back to TCP differ in nothing.
    """
    if needs.fabric is None or not FABRICS[needs.fabric].rdma or len({r.node for r in measurements}) < 2:
        return
    said = f'resources.fabric = "{needs.fabric}"'
    if without := [r for r in measurements if r.rdma is None]:
        yield Finding(
            "warning",
            "fabric",
            f"{_nodes_of(without)}: {said}, but no active adapter is visible, so NCCL uses TCP; "
            f"{_RDMA_ADVICE}",
            odd_node(without, measurements),
        )
        return
    speeds = pair_speeds(measurements)
    if not speeds or any(r.rdma and not r.rdma.opened for r in measurements):
        return
    expected, middle = min(_adapter_speed(r) for r in measurements), statistics.median(speeds.values())
    if middle < OF_ADAPTER * expected:
        yield Finding(
            "warning",
            "fabric",
            f"{_nodes_of(measurements)}: {said}, but the median node reaches {rate(middle)}, and one adapter "
            f'alone carries {rate(expected)}; comm.nccl.debug = "INFO" shows which network NCCL uses',
        )


def _adapter_speed(own: Measurements) -> float:
    """Returns the bytes per second of the node's fastest adapter."""
    return max(float(device.split()[-2]) for device in own.rdma.devices) * 1e9 / 8 if own.rdma else 0.0


def _copies(measurements: Sequence[Measurements], _needs: Needs) -> Iterator[Finding]:
    speeds = {
        r.rank: (r, r.timings["host to device"].bytes_per_s)
        for r in measurements
        if "host to device" in r.timings
    }
    if not speeds:
        return
    middle = statistics.median(speed for _, speed in speeds.values())
    for r, speed in speeds.values():
        if speed < SLOW * middle:
            text = (
                f"rank {r.rank} on {r.node}: {rate(speed)} from host to GPU, "
                f"but the median is {rate(middle)}; check its PCIe link width"
            )
            yield Finding("warning", "host to device", text, odd_node([r], measurements))


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


def _ranks(measurements: Sequence[Measurements]) -> str:
    shown = ", ".join(f"rank {r.rank} on {r.node}" for r in measurements[:4])
    return shown + (f" and {len(measurements) - 4} more" if len(measurements) > 4 else "")


def odd_node(affected: Iterable[Measurements], measurements: Iterable[Measurements]) -> str:
    """Returns the one node of several that is affected, "" if there is no such node."""
    nodes = {r.node for r in affected}
    return nodes.pop() if len(nodes) == 1 and len({r.node for r in measurements}) > 1 else ""


def _nodes_of(measurements: Sequence[Measurements]) -> str:
    nodes = list(dict.fromkeys(r.node for r in measurements))
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more nodes" if len(nodes) > 4 else "")


def size(count: float) -> str:
    """Returns bytes in binary units, such as `512 MiB` or `1.5 GiB`."""
    for name in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {name}"
        count /= 1024
    return f"{count:,.1f} GiB"


def rate(bytes_per_s: float) -> str:
    """Returns a speed in GB/s, the unit of network and PCIe figures."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def figures(measurements: Sequence[Measurements]) -> Mapping[str, tuple[float, Measurements]]:
    """Returns, for each timing, the slowest rank's seconds and that rank's measurements.

    A step waits for the slowest rank.
    """
    names = dict.fromkeys(name for r in measurements for name in r.timings)
    return {
        name: max(
            ((r.timings[name].seconds, r) for r in measurements if name in r.timings),
            key=lambda timing: timing[0],
        )
        for name in names
    }
