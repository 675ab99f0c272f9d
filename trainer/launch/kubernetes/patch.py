"""[kubernetes.patch]: a strategic merge into the pod templates of a rendered MPIJob, as `kubectl patch` would do it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import InputError
from trainer.job.kubernetes import Patch
from trainer.launch.yaml_text import yaml_block

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
"""Lists of a pod whose members have a name of their own (patchMergeKey in Kubernetes' types); every other list is replaced."""
_DIRECTIVE = "$patch"
_NOTE = "# Rendered by `clipship render kubernetes`, with [kubernetes.patch]; changes belong in the job file.\n"


def patched(text: str, patch: Patch) -> str:
    """The text itself where there is no patch, so that its comments stay."""
    if not (patch.launcher or patch.worker):
        return text
    try:
        import yaml  # the client brings it
    except ImportError:
        raise InputError("[kubernetes.patch] needs the Python package pyyaml: pip install 'clipship[launch]'") from None

    class Dumper(yaml.SafeDumper):
        """Texts of several lines, the job file among them, stay readable where YAML allows that."""

        def text(self, value: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", value, style="|" if yaml_block(value, 0).startswith("|") else None)

    Dumper.add_representer(str, Dumper.text)
    documents = list(yaml.safe_load_all(text))
    specs = documents[-1]["spec"]["mpiReplicaSpecs"]
    for role, change in (("Launcher", patch.launcher), ("Worker", patch.worker)):
        specs[role]["template"] = merged(specs[role]["template"], change, f"kubernetes.patch.{role.lower()}")
    dumped = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return _NOTE + str(dumped)


def merged(base: Any, change: Any, path: str) -> Any:
    """Mappings key by key, lists of `_MERGE_KEYS` member by member; `$patch = "replace"` or `"delete"` as in Kubernetes.

    `path` is that of the change in the job file. Raises InputError where a list or a mapping would become something else.
    """
    if base is not None and _kind(base) != _kind(change):
        raise InputError(f"{path} is {_kind(base)} in this manifest, and the patch has {_kind(change)}")
    if isinstance(change, Mapping):
        if change.get(_DIRECTIVE) == "replace" or base is None:
            return _plain({key: value for key, value in change.items() if key != _DIRECTIVE})
        kept = {key: value for key, value in base.items() if not _deleted(change.get(key))}
        changes = {key: value for key, value in change.items() if key != _DIRECTIVE and not _deleted(value)}
        return kept | {key: merged(kept.get(key), value, f"{path}.{key}") for key, value in changes.items()}
    if isinstance(change, Sequence) and not isinstance(change, str):
        key = _MERGE_KEYS.get(path.rpartition(".")[2])
        return _members(base, change, key, path) if key and base is not None else _plain(change)
    return change


def _members(base: Sequence[Any], change: Sequence[Any], key: str, path: str) -> list[Any]:
    """Members of the same name are merged, others follow those that are there."""
    found = {member.get(key): member for member in base}
    for member in change:
        name = member.get(key) if isinstance(member, Mapping) else None
        if _deleted(member):
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), member, f"{path}[{name}]")
    return list(found.values())


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, Sequence) and not isinstance(value, str) else "a single value"


def _deleted(value: object) -> bool:
    return isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"


def _plain(value: Any) -> Any:
    """Job files hold tuples for lists, which YAML does not know."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
