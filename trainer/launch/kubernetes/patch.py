"""Applies [kubernetes.patch] to a rendered object.

It is a strategic merge into its pod templates, as in `kubectl patch`. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config.kubernetes import Patch
from trainer.errors import InputError
from trainer.text.yaml_text import yaml_block, yaml_key

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Key by which members of a pod's list are merged (patchMergeKey in Kubernetes' types); other lists are
replaced."""
_SHARED_PROCESSES = ("shareProcessNamespace", "hostPID")
"""Settings with which a pod's first process is not Clipship's."""
_DIRECTIVE = "$patch"
_HEADER = (
    "# Rendered by `clipship render kubernetes`, with [kubernetes.patch]; changes belong in the job file.\n"
)


Templates = Callable[[list[dict[str, Any]]], dict[str, dict[str, Any]]]
"""Function from rendered objects to their parts that hold a pod's template, by the pod's role."""


def patched(text: str, patch: Patch, pods: Templates) -> str:
    """Returns the patched manifest; without a patch the text itself, so that its comments stay."""
    if not (patch.launcher or patch.worker or patch.both or patch.job):
        return text
    import yaml  # slow to import, rarely needed

    class Dumper(yaml.SafeDumper):
        """Writes texts in quotes, as the templates do, or as blocks if they have several lines."""

        def text(self, value: str) -> yaml.ScalarNode:
            style = "|" if yaml_block(value, 0).startswith("|") else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)

        def represent_mapping(self, *args: Any, **options: Any) -> yaml.MappingNode:
            node = super().represent_mapping(*args, **options)
            for key, _ in node.value:
                if yaml_key(key.value) == key.value:
                    key.style = None
            return node

    Dumper.add_representer(str, Dumper.text)
    documents = list(yaml.safe_load_all(text))
    for role, part in pods(documents).items():
        for name in ("both", role):
            path = f"kubernetes.patch.{name}"
            part["template"] = merged(part["template"], getattr(patch, name), path)
            _refuse_shared_processes(part["template"].get("spec", {}), path)
    _refuse_identity(patch.job)
    documents[-1] = merged(documents[-1], patch.job, "kubernetes.patch.job")
    dumped = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return _HEADER + str(dumped)


def _refuse_identity(change: Mapping[str, Any]) -> None:
    """Raises InputError if the object would be another one, which Clipship does not know."""
    metadata = change.get("metadata")
    named = {"name", "namespace"} & set(metadata) if isinstance(metadata, Mapping) else set()
    other = sorted([*(change.keys() - {"metadata", "spec"}), *(f"metadata.{name}" for name in named)])
    if other:
        raise InputError(
            f"kubernetes.patch.job.{other[0]}: only `metadata` without name and namespace, and `spec` can be "
            "changed; see kubernetes.kind, kubernetes.name and kubernetes.namespace"
        )


def _refuse_shared_processes(spec: Mapping[str, Any], path: str) -> None:
    """Raises InputError if the pod would share its processes with other containers or with the node."""
    shared = [name for name in _SHARED_PROCESSES if spec.get(name)]
    if shared:
        raise InputError(
            f"{path}.spec.{shared[0]} = true: ranks read their variables from their pod's first process, "
            "which must be Clipship's; and every container that sees this process could read the job's ssh "
            "key. Leave the setting out."
        )


def merged(base: Any, change: Any, path: str) -> Any:
    """Returns `base` with the change: mappings are merged by key, the lists of `_MERGE_KEYS` by member.

    `$patch = "replace"` or `"delete"` works as in Kubernetes. `path` is the change's place in the job file.
    Raises InputError if a list or a mapping would become something else.
    """
    if base is not None and _kind(base) != _kind(change):
        raise InputError(f"{path} is {_kind(base)} in the manifest, but {_kind(change)} in the patch")
    if isinstance(change, Mapping):
        kept = {} if base is None or change.get(_DIRECTIVE) == "replace" else dict(base)
        for key, value in change.items():
            if _deleted(value):
                kept.pop(key, None)
            elif key != _DIRECTIVE:
                kept[key] = merged(kept.get(key), value, f"{path}.{key}")
        return kept
    if isinstance(change, Sequence) and not isinstance(change, str):
        key = _MERGE_KEYS.get(path.rpartition(".")[2])
        return (
            _members(base or (), change, key, path)
            if key
            else [merged(None, member, path) for member in change]
        )
    return change


def _members(base: Sequence[Any], change: Sequence[Any], key: str, path: str) -> list[Any]:
    """Returns the merged list: members of the same name are merged, and new ones follow.

    After `{"$patch": "replace"}` only the patch's members are kept.
    """
    replaced = {_DIRECTIVE: "replace"} in change
    members = {} if replaced else {member.get(key): member for member in base}
    for member in change:
        if member == {_DIRECTIVE: "replace"}:
            continue
        if not isinstance(member, Mapping) or key not in member:
            raise InputError(
                f"{path}: {member!r} must be a table with the key {key}, which identifies the members of "
                "this list"
            )
        name = member[key]
        if _deleted(member):
            members.pop(name, None)
        else:
            members[name] = merged(members.get(name), member, f"{path}[{name}]")
    return list(members.values())


def _deleted(value: object) -> bool:
    return isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, Sequence) and not isinstance(value, str) else "a single value"
