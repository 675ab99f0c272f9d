"""Table of the networks between nodes: what a run must set, mount and have in its image to use each one.

A network is one row here; no other module compares a name. Every line has its reason and a public document
that says so. Rates for estimates are in `trainer.config.fabric_rates`. Pure; imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_JUNIPER = "Juniper, AI data centre design, How to Run NCCL Tests (juniper.net/documentation)"
_OPERATOR = "NVIDIA, Kubernetes RDMA shared device plugin (github.com/Mellanox/k8s-rdma-shared-dev-plugin)"
_NCCL = "NCCL user guide, Environment Variables (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)"
_EFA = "AWS, EFA cheatsheet (github.com/aws-samples/awsome-distributed-training, 1.architectures)"
_OFI = "aws-ofi-nccl, release notes of v1.21.1 (github.com/aws/aws-ofi-nccl/releases)"
_LIBFABRIC = "libfabric, list of its variables (`fi_info -e`)"
_EKS = "Amazon EKS user guide, Manage EFA devices (docs.aws.amazon.com/eks, device-management-efa)"
_TCPXO = (
    "Google, GPUDirect-TCPXO release notes of Jan 9, 2026 "
    "(github.com/GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpxo/README.md)"
)
_TCPXO_POD = (
    "Google, nccl-test-latest.yaml (github.com/GoogleCloudPlatform/container-engine-accelerators, "
    "gpudirect-tcpxo)"
)
_TCPXO_LIBRARIES = "/usr/local/nvidia/lib64"
_TCPXO_DEVICES = "".join(
    f"- path: /dev/{name}\n"
    for name in (*(f"nvidia{gpu}" for gpu in range(8)), "nvidiactl", "nvidia-uvm", "dmabuf_import_helper")
)
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
class Sidecar:
    """A service that runs beside the ranks in each worker's pod, as root."""

    name: str
    image: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    capabilities: tuple[str, ...]
    folders: Mapping[str, str]
    """Paths in the container by folders of the node."""
    why: str
    source: str

    @property
    def line(self) -> Line:
        return Line(self.name, self.image, self.why, self.source)


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
    refused: Mapping[str, str] = field(default_factory=dict)
    """Schedulers for which the row is not complete, with the reason and the advice."""
    annotations: tuple[Line, ...] = ()
    """Annotations of the workers' pods."""
    asked_annotations: tuple[Line, ...] = ()
    """Annotations with the cluster's own names, which the job must give."""
    folders: tuple[Line, ...] = ()
    """Folders of the node that the workers' pods mount."""
    sidecar: Sidecar | None = None
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
            ("annotation", self.annotations + self.asked_annotations),
            ("mount", self.folders),
            ("sidecar", (self.sidecar.line,) if self.sidecar else ()),
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


def _tcpxo(name: str, value: str, why: str) -> Line:
    return Line(name, value, why, _TCPXO)


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
                _LIBFABRIC,
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
        name="tcpxo",
        title="GPUDirect-TCPXO of GKE (A3 Mega)",
        rdma=False,
        refused={
            "slurm": "its plugin and its service are known here for pods of Google Kubernetes Engine only: "
            "use [kubernetes], or leave resources.fabric out and set the variables in [env]"
        },
        annotations=(
            Line(
                "devices.gke.io/container.tcpxo-daemon",
                _TCPXO_DEVICES,
                "the service gets the GPUs without being privileged and without taking them from the ranks",
                _TCPXO_POD,
            ),
            Line("networking.gke.io/default-interface", "eth0", "the pod's usual network", _TCPXO_POD),
        ),
        asked_annotations=(
            Line(
                "networking.gke.io/interfaces",
                '[{"interfaceName":"eth0","network":"default"},{"interfaceName":"eth1","network":"vpc1"},...]',
                "eth1 to eth8 are the GPU networks, whose names the cluster chooses",
                _TCPXO_POD,
            ),
        ),
        folders=(
            Line(
                "/home/kubernetes/bin/nvidia/lib64",
                _TCPXO_LIBRARIES,
                "the installer leaves the plugin, its tuner and its NCCL there",
                _TCPXO_POD,
            ),
            Line("/dev/aperture_devices", "/dev/aperture_devices", "the plugin's devices", _TCPXO_POD),
        ),
        sidecar=Sidecar(
            name="tcpxo-daemon",
            image="us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.21",
            command=(
                "/bin/sh",
                "-c",
                (
                    "chmod 755 /fts/entrypoint_rxdm_container.sh && "
                    "exec /fts/entrypoint_rxdm_container.sh --num_hops=2"
                ),
            ),
            variables={"LD_LIBRARY_PATH": _TCPXO_LIBRARIES},
            capabilities=("NET_ADMIN", "NET_BIND_SERVICE"),
            folders={
                "/home/kubernetes/bin/nvidia/lib64": _TCPXO_LIBRARIES,
                "/sys": "/hostsysfs",
                "/proc/sys": "/hostprocsysfs",
            },
            why="the service that moves the data; it must be in the pod's network, and ends with the ranks",
            source=f"{_TCPXO}, and best-practice.md beside it",
        ),
        nccl=NcclRange("2.28", "2.28", "the plugin is qualified for NCCL 2.28.7", _TCPXO),
        variables=(
            Line(
                "LD_LIBRARY_PATH",
                _TCPXO_LIBRARIES,
                "the plugin and its tuner lie in the node's folder that is mounted there",
                _TCPXO_POD,
            ),
            Line(
                "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY",
                "/dev/aperture_devices",
                "the folder of the plugin's devices, which is mounted there",
                _TCPXO_POD,
            ),
            _tcpxo("NCCL_FASTRAK_CTRL_DEV", "eth0", "interface of the plugin's control messages"),
            _tcpxo(
                "NCCL_FASTRAK_IFNAME",
                "eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8",
                "interfaces of the eight GPU networks",
            ),
            _tcpxo("NCCL_SOCKET_IFNAME", "eth0", "interface of NCCL's own start"),
            *(
                _tcpxo(name, value, "the release was tuned with it, and checks NCCL's settings at the start")
                for name, value in (
                    ("NCCL_CROSS_NIC", "0"),
                    ("NCCL_PROTO", "Simple,LL128"),
                    ("NCCL_MIN_NCHANNELS", "4"),
                    ("NCCL_NVLSTREE_MAX_CHUNKSIZE", "131072"),
                    ("NCCL_P2P_NET_CHUNKSIZE", "524288"),
                    ("NCCL_P2P_PCI_CHUNKSIZE", "524288"),
                    ("NCCL_P2P_NVL_CHUNKSIZE", "1048576"),
                    ("NCCL_FASTRAK_NUM_FLOWS", "2"),
                    ("NCCL_FASTRAK_USE_SNAP", "1"),
                    ("NCCL_FASTRAK_PLUGIN_ACCEPT_TIMEOUT_MS", "600000"),
                    ("NCCL_FASTRAK_ENABLE_CONTROL_CHANNEL", "0"),
                    ("NCCL_BUFFSIZE", "8388608"),
                    ("NCCL_NET_GDR_LEVEL", "PIX"),
                    ("NCCL_FASTRAK_ENABLE_HOTPATH_LOGGING", "0"),
                    ("NCCL_FASTRAK_USE_LLCM", "1"),
                    ("NCCL_NVLS_ENABLE", "1"),
                )
            ),
            _tcpxo("NCCL_TUNER_PLUGIN", "libnccl-tuner.so", "chooses algorithms for this network"),
            _tcpxo(
                "NCCL_TUNER_CONFIG_PATH",
                f"{_TCPXO_LIBRARIES}/a3plus_tuner_config.textproto",
                "the tuner's table",
            ),
            _tcpxo(
                "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE",
                f"{_TCPXO_LIBRARIES}/a3plus_guest_config.textproto",
                "settings that the plugin compares at its start",
            ),
        ),
        image=(
            Line(
                "glibc",
                "2.35 or newer",
                "the plugin is built against it (Debian 12, Ubuntu 22.04)",
                "Google, GPUDirect-TCPXO release notes of May 1, 2025 "
                "(github.com/GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpxo/README.md)",
            ),
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
