"""Formats the preflight for people: the measurements, then the findings. No torch."""

from collections.abc import Iterator, Sequence

from trainer.config.gpus import GIB, gpu_named
from trainer.preflight.measurements import Finding, Measurements, figures, pair_speeds, rate, size
from trainer.text.table import by_topic
from trainer.text.wording import many

_SHOWN_PLACES = 8
"""Ranks of the first node whose places are shown."""


def lines(
    measurements: Sequence[Measurements], findings: Sequence[Finding], left_out: Sequence[str], headline: str
) -> Iterator[str]:
    """Yields aligned lines, one per topic; the worst node of each figure is named."""
    nodes = list(dict.fromkeys(r.node for r in measurements))
    world = f"{many(len(measurements), 'rank')} on {many(len(nodes), 'node')}"
    rows = [("world", f"{world}: {', '.join(nodes[:6])}{' ...' if len(nodes) > 6 else ''}")]
    rows += [("collectives", "every kind gives right values, of tensors and of objects")] * (
        not any(r.wrong for r in measurements)
    )
    rows += list(_speeds(measurements))
    rows += list(_hosts(measurements))
    rows += list(_placements(measurements))
    rows += [("not measured", f"{', '.join(left_out)}: time ran out (health.preflight_s)")] * bool(left_out)
    rows += [(finding.severity, f"{finding.check}: {finding.text}") for finding in findings]
    rows += [("result", headline)]
    yield from by_topic(rows, 15)


def _speeds(measurements: Sequence[Measurements]) -> Iterator[tuple[str, str]]:
    for name, (seconds, slowest) in figures(measurements).items():
        timing = slowest.timings[name]
        if name == "latency":
            yield name, f"{seconds * 1e6:,.0f} us for an all_reduce of {timing.bytes} bytes"
        else:
            took = f"{size(timing.bytes)} in {seconds * 1e3:.3g} ms (slowest: {_who(slowest)})"
            yield name, f"{rate(timing.bytes_per_s)}: {took}"
    speeds = pair_speeds(measurements)
    if speeds:
        slowest_unit = min(speeds, key=lambda node_or_rank: speeds[node_or_rank])
        least, most = rate(speeds[slowest_unit]), rate(max(speeds.values()))
        yield "pairs", f"{least} ({slowest_unit}) to {most}, each in its best pair"


def _hosts(measurements: Sequence[Measurements]) -> Iterator[tuple[str, str]]:
    shm = [(r.shm_bytes, r) for r in measurements if r.shm_bytes is not None]
    if shm:
        least, where = min(shm, key=lambda free: free[0])
        yield "/dev/shm", f"at least {size(least)} free ({where.node})"
    yield "open files", f"at least {min(r.open_files for r in measurements):,}"
    if measurements[0].disk_bytes is not None:
        yield "disk", f"{size(measurements[0].disk_bytes)} free for the run folder"
    clocks = [r.clock_s for r in measurements]
    yield "clocks", f"within {max(clocks) - min(clocks):.3f} s of each other"
    rdma = [r.rdma for r in measurements if r.rdma is not None]
    if rdma:
        opened = sum(devices.opened for devices in rdma)
        yield "RDMA", f"{opened} of {many(len(rdma), 'rank')} use an RDMA device of their node"
    gpus = [r.gpu for r in measurements if r.gpu is not None]
    if gpus:
        names, free = sorted({gpu.name for gpu in gpus}), min(gpu.free_bytes for gpu in gpus)
        yield "GPUs", f"{', '.join(names)}; at least {size(free)} free"
    yield from _gpu_rates(measurements)


def _gpu_rates(measurements: Sequence[Measurements]) -> Iterator[tuple[str, str]]:
    """Yields the speed of the slowest GPU, and what a job may say of one that the table of GPUs lacks."""
    found = [(r.tflops, r) for r in measurements if r.tflops is not None]
    if not found:
        return
    tflops, slowest = min(found, key=lambda rate: rate[0])
    yield "GPU products", f"at least {tflops:,.0f} TFLOP/s in bf16 ({_who(slowest)})"
    gpu, copy = slowest.gpu, slowest.timings.get("within the GPU")
    if gpu is not None and copy is not None and gpu_named(gpu.name) is None:
        rates = (
            f"memory_gib = {gpu.total_bytes / GIB:.1f}, tflops = {tflops:.0f}, "
            f"bandwidth_gb_s = {copy.bytes_per_s / 1e9:.0f}"
        )
        yield "", f"resources.gpu has no {gpu.name}; for `clipship check`: gpu_rates = {{ {rates} }}"


def _placements(measurements: Sequence[Measurements]) -> Iterator[tuple[str, str]]:
    """Yields how many ranks are on CPUs next to their GPU, and the places of the first node's ranks."""
    placed = [(r, r.placement) for r in measurements if r.placement is not None]
    if not placed:
        return
    near = sum(place.near for _, place in placed)
    yield "CPUs", f"{near} of {many(len(placed), 'rank')} on CPUs next to the GPU alone"
    first = placed[0][0].node
    for own, place in [pair for pair in placed if pair[0].node == first][:_SHOWN_PLACES]:
        node = "unknown NUMA node" if place.numa_node is None else f"NUMA node {place.numa_node}"
        adapters = f", {', '.join(place.adapters)} {place.closeness}" if place.adapters else ""
        yield "", f"{_who(own)}: GPU {place.gpu}, {node}, CPUs {place.cpus}{adapters}"


def _who(measured: Measurements) -> str:
    return f"rank {measured.rank} on {measured.node}"
