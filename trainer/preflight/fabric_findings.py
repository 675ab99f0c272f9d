"""Finds nodes that do not use the network that they have, or that the job says they have. Pure, no torch."""

import statistics
from collections.abc import Iterator, Sequence

from trainer.config.fabric_rates import slowest_adapter_gb_s
from trainer.config.fabrics import FABRICS
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


FABRIC_CHECKS = (_rdma, _fabric, _locked_memory)
"""Checks in the order in which their findings are shown."""
