"""Table of the networks between nodes: what a run must set, mount and have in its image to use each one.

A network is one row here; no other module compares a name. Every line has its reason and a public document
that says so. Rates for estimates are in `trainer.config.fabric_rates`. Pure; imports nothing but dataclasses.
"""

from dataclasses import dataclass

_JUNIPER = "Juniper, AI data centre design, How to Run NCCL Tests (juniper.net/documentation)"
_OPERATOR = "NVIDIA, Kubernetes RDMA shared device plugin (github.com/Mellanox/k8s-rdma-shared-dev-plugin)"
_NCCL = "NCCL user guide, Environment Variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)"
_EFA = "AWS, EFA cheatsheet (github.com/aws-samples/awsome-distributed-training, 1.architectures)"
_OFI = "aws-ofi-nccl, release notes of v1.21.1 (github.com/aws/aws-ofi-nccl/releases)"
_EKS = "Amazon EKS user guide, Manage EFA devices (docs.aws.amazon.com/eks, device-management-efa)"
_VERBS = "Linux, Documentation/infiniband/user_verbs.rst"


@dataclass(frozen=True)
class Line:
    """One thing that a network needs, with the reason and the public document that says so."""

    name: str
    value: str
    why: str
    source: str


@dataclass(frozen=True)
class NcclRange:
    """Versions of NCCL that fit; an empty string is no bound.

    Only as many parts of a version are compared as the bound has.
    """

    oldest: str
    newest: str
    why: str
    source: str

    def fits(self, version: str) -> bool:
        """Returns whether the version of NCCL is in the range."""
        return not (
            (self.oldest and _parts(version, self.oldest) < _parts(self.oldest, self.oldest))
            or (self.newest and _parts(version, self.newest) > _parts(self.newest, self.newest))
        )

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return self.oldest
        return f"{self.oldest} to {self.newest}" if self.newest else f"{self.oldest} or newer"


def _parts(version: str, bound: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))[: bound.count(".") + 1]


@dataclass(frozen=True)
class Fabric:
    """One network between nodes."""

    name: str
    """Value of `resources.fabric`."""
    title: str
    rdma: bool
    """True if NCCL opens RDMA devices, for which it pins memory."""
    device: Line | None = None
    """Resource under which Kubernetes offers the adapters; the job names it in `kubernetes.rdma`."""
    nccl: NcclRange | None = None
    variables: tuple[Line, ...] = ()
    """Environment variables of every rank."""
    memory: tuple[Line, ...] = ()
    """Limits and capabilities."""
    image: tuple[Line, ...] = ()
    """Libraries that the image, or the node where there is none, must hold."""

    @property
    def sections(self) -> tuple[tuple[str, tuple[Line, ...]], ...]:
        """Lines of the row, by the word with which `clipship fabrics explain` begins each."""
        devices = (self.device,) if self.device else ()
        return (
            ("variable", self.variables),
            ("device", devices),
            ("memory", self.memory),
            ("image", self.image),
        )


_PINNED = Line(
    "memlock",
    "unlimited",
    "an adapter reads and writes memory that must not move, and a limit makes NCCL fail to register it; on "
    "Slurm the script raises the limit or says that it cannot, on Kubernetes the capability IPC_LOCK does",
    _VERBS,
)
_VERBS_LIBRARY = Line(
    "libibverbs",
    "with the adapter's provider (rdma-core)",
    "NCCL loads it at its start, and without it sees no adapter",
    _VERBS,
)
_SHARED_ADAPTERS = Line(
    "kubernetes.rdma",
    "rdma/NAME",
    "the settings of the cluster's device plugin choose the name; a container without it sees no adapter",
    _OPERATOR,
)
_NET_IB = Line(
    "NCCL_NET",
    "IB",
    "NCCL's own transport for InfiniBand and RoCE; a run that cannot use it fails at its start instead of "
    "going on over TCP",
    _NCCL,
)


_ROWS = (
    Fabric(
        name="ib",
        title="InfiniBand",
        rdma=True,
        device=_SHARED_ADAPTERS,
        variables=(_NET_IB,),
        memory=(_PINNED,),
        image=(_VERBS_LIBRARY,),
    ),
    Fabric(
        name="roce",
        title="RoCE v2: RDMA over Ethernet",
        rdma=True,
        device=_SHARED_ADAPTERS,
        nccl=NcclRange(
            "2.21",
            "",
            "since then NCCL finds the index of the RoCE v2 address itself, without NCCL_IB_GID_INDEX",
            _JUNIPER,
        ),
        variables=(_NET_IB,),
        memory=(_PINNED,),
        image=(_VERBS_LIBRARY,),
    ),
    Fabric(
        name="efa",
        title="Elastic Fabric Adapter of AWS",
        rdma=True,
        device=Line(
            "kubernetes.rdma",
            "vpc.amazonaws.com/efa",
            "the device plugin's name; the number of adapters depends on the instance type",
            _EKS,
        ),
        nccl=NcclRange("2.17.1", "", "the oldest release that aws-ofi-nccl 1.21 still works with", _OFI),
        variables=(
            Line(
                "FI_PROVIDER",
                "efa",
                "libfabric then offers no other provider, so the plugin cannot choose TCP",
                _EFA,
            ),
            Line(
                "FI_EFA_USE_HUGE_PAGE",
                "0",
                "the loader processes are forked, and a fork fails when the system has no huge pages left",
                _EFA,
            ),
        ),
        memory=(_PINNED,),
        image=(
            Line("aws-ofi-nccl", "1.7 or newer", "the plugin through which NCCL uses libfabric", _EFA),
            Line("libfabric", "1.18 or newer, with the provider efa", "the plugin is built on it", _EFA),
        ),
    ),
    Fabric(
        name="ethernet",
        title="Ethernet with TCP",
        rdma=False,
        variables=(
            Line(
                "NCCL_NET",
                "Socket",
                "NCCL's own transport for TCP, also where a node has adapters or a plugin that fail",
                _NCCL,
            ),
        ),
    ),
)

FABRICS: dict[str, Fabric] = {row.name: row for row in _ROWS}
"""Rows by name."""
