"""Values of a pod as its YAML writes them. Pure."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.kubernetes import Mount, Toleration

Yaml = dict[str, Any]


def plain_variables(variables: Mapping[str, str]) -> list[Yaml]:
    """Returns variables with plain values. Kubernetes expands $(NAME), and $$ stands for $."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()]


def toleration(borne: Toleration) -> Yaml:
    """Returns the toleration of a node's taint."""
    key = {"key": borne.key} if borne.key else {}
    meaning = {"operator": "Exists"} if borne.value is None else {"operator": "Equal", "value": borne.value}
    return key | meaning | ({"effect": borne.effect} if borne.effect else {})


def volume(number: int, mount: Mount) -> Yaml:
    """Returns the volume of the pod."""
    return {"name": f"mount-{number}", **_SOURCES[mount.kind](mount)}


def _csi(mount: Mount) -> Yaml:
    read_only = {"readOnly": True} if mount.read_only else {}
    attributes = {"volumeAttributes": dict(mount.attributes)} if mount.attributes else {}
    return {"csi": {"driver": mount.source, **read_only, **attributes}}


def _empty(mount: Mount) -> Yaml:
    medium = {"medium": mount.medium} if mount.medium else {}
    return {"emptyDir": medium | ({"sizeLimit": mount.size} if mount.size else {})}


_SOURCES: dict[str, Callable[[Mount], Yaml]] = {
    "pvc": lambda mount: {"persistentVolumeClaim": {"claimName": mount.source}},
    # with this type a mistyped path fails, instead of making an empty folder on every node
    "host": lambda mount: {"hostPath": {"path": mount.source, "type": "Directory"}},
    "nfs": lambda mount: {"nfs": {"server": mount.server, "path": mount.source}},
    "secret": lambda mount: {"secret": {"secretName": mount.source}},
    "configmap": lambda mount: {"configMap": {"name": mount.source}},
    "csi": _csi,
    "empty": _empty,
}
"""Functions from a mount to the source of its volume, by the mount's kind."""


def mounted(number: int, mount: Mount) -> Yaml:
    """Returns the mount of the volume in a container."""
    sub_path = {"subPath": mount.sub_path} if mount.sub_path else {}
    return {"name": f"mount-{number}", "mountPath": mount.path, **sub_path} | (
        {"readOnly": True} if mount.read_only else {}
    )


def memory(size_gib: float | None) -> Yaml:
    """Returns the memory of a container's resources, given in GiB; an empty table for None."""
    return {} if size_gib is None else {"memory": gib(size_gib)}


def gib(size: float) -> str:
    """Converts GiB to a quantity of Kubernetes: 1.5 to 1536Mi, 64 to 64Gi."""
    return f"{int(size)}Gi" if size == int(size) else f"{math.ceil(size * 1024)}Mi"


def cores(count: float) -> str:
    """Converts cores to a quantity of Kubernetes: 2.0 to 2, 0.5 to 500m."""
    return f"{int(count)}" if count == int(count) else f"{math.ceil(count * 1000)}m"
