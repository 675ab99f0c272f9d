"""Table of the networks between nodes: what a run must set, mount and have in its image to use each one.

The rows are in fabrics.toml; no other module compares a name. Rates for estimates are in
`trainer.config.fabric_rates`. Pure; imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.sysinfo.own_table import completed, own_table


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
    host_network: Line
    """Line that says if the workers' pods must be on the nodes' network."""
    rdma: bool = False
    """True if NCCL opens RDMA devices, for which it pins memory."""
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
            ("memory", _lines(_FILE["memory"] + _FILE["pinned_memory"] * self.rdma)),
            ("image", self.image),
        )


def rows(kind: str) -> dict[str, dict[str, Any]]:
    """Returns the fields of the file's rows of a kind, by their names, without this name itself."""
    return {
        name: {key: _READ.get(key, _plain)(value) for key, value in row.items()}
        for name, row in completed(_FILE[kind]).items()
    }


def _lines(groups: Sequence[Mapping[str, Any]]) -> tuple[Line, ...]:
    return tuple(
        Line(name, value, group["why"], _named(group["source"]))
        for group in groups
        for name, value in group["values"].items()
    )


def _line(group: Mapping[str, Any]) -> Line:
    [line] = _lines([group])
    return line


def _nccl(given: Mapping[str, str]) -> NcclRange:
    return NcclRange(**{**given, "source": _named(given["source"])})


def _sidecar(given: Mapping[str, Any]) -> Sidecar:
    return Sidecar(**{key: _plain(value) for key, value in given.items()})


def _named(source: str) -> str:
    return str(_FILE["sources"].get(source, source))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("host_network", "device", "platform"), _line),
    **dict.fromkeys(("variables", "annotations", "asked_annotations", "folders", "image"), _lines),
    "nccl": _nccl,
    "sidecar": _sidecar,
    "source": _named,
}
_FILE = own_table(__file__, "fabrics.toml")

FABRICS = {name: Fabric(name=name, **fields) for name, fields in rows("fabric").items()}
"""Rows by name."""
