"""Types of the table of networks between nodes (`trainer.config.fabrics`). Pure; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """One thing that a network needs, with the reason and the public document that says so."""

    name: str
    value: str
    why: str
    source: str


SHARED_MEMORY = Line(
    "/dev/shm",
    "2 GiB for each GPU (kubernetes.shm_gb)",
    "the ranks of a node and the loader processes share buffers there, and a container has only 64 MiB; on "
    "Slurm it is the node's own",
    "NCCL user guide, Troubleshooting, Shared memory "
    "(docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html)",
)


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
    ready_file: str
    """File that the service makes when it is ready; the ranks start after that."""
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
    host_network: Line
    """Line that says if the workers' pods must be on the nodes' network."""
    needs_interface: bool = False
    """True if a pod needs the nodes' network, or further networks in its annotations."""
    device: Line | None = None
    """Resource under which Kubernetes offers the adapters; the job names it in `kubernetes.rdma`."""
    nccl: NcclRange | None = None
    platform: Line | None = None
    """Line with the only value of `image.platform` that fits; None if each does."""
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
    """Limits and capabilities, beside the shared memory that every network needs."""
    image: tuple[Line, ...] = ()
    """Libraries that the image, or the node where there is none, must hold."""

    @property
    def sections(self) -> tuple[tuple[str, tuple[Line, ...]], ...]:
        """Lines of the row, by the word with which `clipship fabrics explain` begins each."""
        devices = (self.device,) if self.device else ()
        return (
            ("platform", (self.platform,) if self.platform else ()),
            ("variable", self.variables),
            ("device", devices),
            ("network", (self.host_network,)),
            ("annotation", self.annotations + self.asked_annotations),
            ("mount", self.folders),
            ("sidecar", (self.sidecar.line,) if self.sidecar else ()),
            ("memory", (SHARED_MEMORY, *self.memory)),
            ("image", self.image),
        )
