"""Sums measurements up over nodes, and writes sizes and rates for people. Pure, no torch."""

from collections.abc import Iterable, Mapping, Sequence

from trainer.preflight.measurements import Measurements


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


def odd_node(affected: Iterable[Measurements], measurements: Iterable[Measurements]) -> str:
    """Returns the one node of several that is affected, "" if there is no such node."""
    nodes = {r.node for r in affected}
    return nodes.pop() if len(nodes) == 1 and len({r.node for r in measurements}) > 1 else ""


def nodes_of(measurements: Sequence[Measurements]) -> str:
    """Returns the nodes of the measurements by name, at most four of them."""
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
