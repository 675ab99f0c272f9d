"""Table of the plugins through which NCCL uses a network: how each gets into an image, and what it needs.

A plugin is one row here, and one script in docker/plugins/ that installs it or looks for it. Every row has
its reason and a public document that says so. Pure; imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from trainer.config.fabric_row import Line, NcclRange


@dataclass(frozen=True)
class Archive:
    """A file that the build downloads, or takes from image.site.sources."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Plugin:
    """One plugin of NCCL."""

    name: str
    """Value in `image.plugins`."""
    title: str
    fabric: str
    """Network in `trainer.config.fabrics` that it is for."""
    origin: Literal["archive", "base", "node"]
    """Origin: the build installs it, image.base has it, or the nodes mount it into the pods."""
    why: str
    source: str
    archive: Archive | None = None
    script: str = ""
    """File in docker/plugins/; empty for a plugin of the nodes."""
    systems: tuple[str, ...] = ()
    """Distributions in docker/stacks.toml that it supports; empty for all."""
    nccl: NcclRange | None = None
    variables: tuple[Line, ...] = ()
    """Variables of every rank on its network, beside those of the network."""
    replaces: tuple[str, ...] = ()
    """Variables of its network that do not hold with it."""

    @property
    def line(self) -> Line:
        text = {
            "archive": f'image.plugins = ["{self.name}"]',
            "base": f'image.plugins = ["{self.name}"], on a base that has it',
            "node": "of the nodes",
        }[self.origin]
        return Line(self.title, text, self.why, self.source)


_INSTALLER = (
    "AWS, install options of the EFA installer (docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start.html); "
    "its hash is also in github.com/ai-dynamo/dynamo"
)
_OFI = "aws-ofi-nccl, release notes of v1.20.0 (github.com/aws/aws-ofi-nccl)"
_HPCX = (
    "NVIDIA HPC-X 2.26, NCCL-RDMA-SHARP Plugins "
    "(docs.nvidia.com/networking/display/hpcxv226/NCCL-RDMA-SHARP-Plugins)"
)

_ROWS = (
    Plugin(
        name="aws-ofi-nccl",
        title="aws-ofi-nccl 1.20.0, with libfabric 2.4.0",
        fabric="efa",
        origin="archive",
        why="through it NCCL uses EFA; AWS's installer 1.49.0 brings both, in its form for containers",
        source=_INSTALLER,
        archive=Archive(
            "https://efa-installer.amazonaws.com/aws-efa-installer-1.49.0.tar.gz",
            "cf2e9281a2328a243c76f911a490faed43ca0fecfe4733c25e34b2e92a32c309",
        ),
        script="aws-ofi-nccl.sh",
        systems=("debian-12", "debian-13", "ubuntu-22.04", "ubuntu-24.04"),
        nccl=NcclRange("2.17.1", "", "the oldest release that aws-ofi-nccl 1.20.0 works with", _OFI),
        variables=(
            Line(
                "NCCL_NET_PLUGIN",
                "ofi",
                "in its form for containers the plugin is not the one that NCCL takes by itself",
                _OFI,
            ),
        ),
    ),
    Plugin(
        name="nccl-rdma-sharp",
        title="nccl-rdma-sharp",
        fabric="ib",
        origin="base",
        why="through it the switches reduce (SHARP); NVIDIA distributes it in HPC-X, which its PyTorch "
        "images have",
        source=_HPCX,
        script="nccl-rdma-sharp.sh",
        variables=(Line("NCCL_COLLNET_ENABLE", "1", "NCCL then uses SHARP for reductions", _HPCX),),
        replaces=("NCCL_NET",),
    ),
    Plugin(
        name="tcpxo",
        title="GPUDirect-TCPXO",
        fabric="tcpxo",
        origin="node",
        why="the cluster's DaemonSet nccl-tcpxo-installer puts it into the nodes' folder that the pods mount",
        source="Google, nccl-tcpxo-installer.yaml "
        "(github.com/GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpxo)",
    ),
)

PLUGINS: dict[str, Plugin] = {row.name: row for row in _ROWS}
"""Rows by name."""


def plugins_for(fabric: str) -> tuple[Plugin, ...]:
    """Returns the plugins that are for a network."""
    return tuple(row for row in _ROWS if row.fabric == fabric)
