"""Values of a pod as its YAML writes them. Pure."""

import math
from collections.abc import Mapping
from typing import Any

from trainer.job.kubernetes_values import Mount, Toleration

Yaml = dict[str, Any]


def plain_variables(variables: Mapping[str, str]) -> list[Yaml]:
    """Kubernetes expands $(NAME), and takes $$ for $."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()]


def toleration(borne: Toleration) -> Yaml:
    """Of a node's taint."""
    key = {"key": borne.key} if borne.key else {}
    meaning = {"operator": "Exists"} if borne.value is None else {"operator": "Equal", "value": borne.value}
    return key | meaning | ({"effect": borne.effect} if borne.effect else {})


def volume(number: int, mount: Mount) -> Yaml:
    """The pod's."""
    name = {"name": f"mount-{number}"}
    if mount.kind == "pvc":
        return name | {"persistentVolumeClaim": {"claimName": mount.source}}
    if mount.kind == "nfs":
        return name | {"nfs": {"server": mount.server, "path": mount.source}}
    return name | {"hostPath": {"path": mount.source, "type": "Directory"}}  # else a typing error makes an empty folder on every node


def mounted(number: int, mount: Mount) -> Yaml:
    """The same in a container."""
    sub_path = {"subPath": mount.sub_path} if mount.sub_path else {}
    return {"name": f"mount-{number}", "mountPath": mount.path, **sub_path} | ({"readOnly": True} if mount.read_only else {})


def memory(size_gib: float | None) -> Yaml:
    """Of a container's resources; None: nothing is said of it."""
    return {} if size_gib is None else {"memory": gib(size_gib)}


def gib(size: float) -> str:
    """1.5 -> 1536Mi, 64 -> 64Gi."""
    return f"{int(size)}Gi" if size == int(size) else f"{math.ceil(size * 1024)}Mi"


def cores(count: float) -> str:
    """2.0 -> 2, 0.5 -> 500m."""
    return f"{int(count)}" if count == int(count) else f"{math.ceil(count * 1000)}m"
