"""Table of the rates of networks, for estimates before a run starts. Pure; imports no torch.

What a run must set to use a network is in `trainer.config.fabrics`.

Rates are those of one direction. docs/performance.md names where they come from.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FabricRate:
    """Links of nodes with several GPUs each."""

    name: str
    node_gb_s: float
    """10^9 bytes a second that a node sends, over all its adapters."""
    gpu_gb_s: float
    """10^9 bytes a second that a GPU sends to those of its node."""
    latency_us: float
    """Microseconds of one hop between nodes, as a collective sees it."""
    source: str


_ROWS = (
    FabricRate("XDR", 800, 900, 5, "8 x 800 Gb/s InfiniBand (DGX B300), NVLink 5"),
    FabricRate("NDR", 400, 450, 5, "8 x 400 Gb/s InfiniBand (DGX H100 and H200), NVLink 4"),
    FabricRate("HDR", 200, 300, 5, "8 x 200 Gb/s InfiniBand (DGX A100), NVLink 3"),
    FabricRate("EFA-3200", 400, 450, 15, "3,200 Gb/s EFA (AWS p5), NVLink 4"),
    FabricRate("EFA-400", 50, 300, 15, "400 Gb/s EFA (AWS p4d), NVLink 3"),
    FabricRate("ETH-100", 12.5, 32, 30, "100 Gb/s Ethernet, GPUs over PCIe 4.0 x16"),
)

FABRIC_RATES: dict[str, FabricRate] = {row.name: row for row in _ROWS}
"""Rows by name."""
