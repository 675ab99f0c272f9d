"""Table of the rates of networks, for estimates before a run starts. Pure; imports no torch.

What a run must set to use a network is in `trainer.config.fabrics`.

Rates are those of one direction. docs/performance.md names where they come from.
"""

from dataclasses import dataclass

from trainer.config.gpus import GpuName


@dataclass(frozen=True)
class FabricRate:
    """Links of nodes with several GPUs each."""

    name: str
    fabric: str
    """Network in `trainer.config.fabrics`."""
    gpus: tuple[GpuName, ...]
    """GPUs whose nodes have these links in place of those of the network's first row."""
    adapters: int
    """Number of adapters of a node."""
    node_gb_s: float
    """10^9 bytes a second that a node sends, over all its adapters."""
    gpu_gb_s: float
    """10^9 bytes a second that a GPU sends to those of its node."""
    latency_us: float
    """Microseconds of one hop between nodes, as a collective sees it."""
    source: str


_A100: tuple[GpuName, ...] = ("A100-40GB", "A100-80GB", "A800-80GB")
_ROWS = (
    FabricRate("NDR", "ib", (), 8, 400, 450, 5, "8 x 400 Gb/s InfiniBand (DGX H100 and H200), NVLink 4"),
    FabricRate("XDR", "ib", ("B300",), 8, 800, 900, 5, "8 x 800 Gb/s InfiniBand (DGX B300), NVLink 5"),
    FabricRate("HDR", "ib", _A100, 8, 200, 300, 5, "8 x 200 Gb/s InfiniBand (DGX A100), NVLink 3"),
    FabricRate("EFA-3200", "efa", (), 32, 400, 450, 15, "32 x 100 Gb/s EFA (AWS p5), NVLink 4"),
    FabricRate("EFA-400", "efa", _A100, 4, 50, 300, 15, "4 x 100 Gb/s EFA (AWS p4d), NVLink 3"),
    FabricRate("TCPXO", "tcpxo", (), 8, 200, 450, 30, "8 x 200 Gb/s GPUDirect-TCPXO (GKE A3 Mega), NVLink 4"),
    FabricRate("ETH-100", "ethernet", (), 1, 12.5, 32, 30, "100 Gb/s Ethernet, GPUs over PCIe 4.0 x16"),
    FabricRate("ETH-10", "ethernet", (), 1, 1.25, 32, 30, "10 Gb/s Ethernet, GPUs over PCIe 4.0 x16"),
)

FABRIC_RATES: dict[str, FabricRate] = {row.name: row for row in _ROWS}
"""Rows by name."""


def rates_between(network: str | None, gpu: str | None) -> FabricRate:
    """Returns the rates to assume for nodes with this GPU; a network without rows counts as InfiniBand."""
    rows = [row for row in _ROWS if row.fabric == network] or [row for row in _ROWS if row.fabric == "ib"]
    return next((row for row in rows if gpu in row.gpus), rows[0])


def slowest_adapter_gb_s(fabric: str) -> float:
    """Returns 10^9 bytes a second of one adapter, for the slowest of the network's rows; 0 without a row."""
    return min((row.node_gb_s / row.adapters for row in _ROWS if row.fabric == fabric), default=0.0)
