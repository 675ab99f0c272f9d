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
            readable = yaml_block(value, 0).startswith("|")
            style = "|" if readable else None if value.isprintable() else '"'  # which alone keeps U+0085
            return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)

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
        kept = {} if base is None or change.get(_DIRECTIVE) == "replace" else dict(base)
        for key, value in change.items():
            if _deleted(value):
                kept.pop(key, None)
            elif key != _DIRECTIVE:
                kept[key] = merged(kept.get(key), value, f"{path}.{key}")
        return kept
    if isinstance(change, Sequence) and not isinstance(change, str):
        key = _MERGE_KEYS.get(path.rpartition(".")[2])
        return _members(base or (), change, key, path) if key else [merged(None, member, path) for member in change]
    return change


def _members(base: Sequence[Any], change: Sequence[Any], key: str, path: str) -> list[Any]:
    """Members of the same name are merged, others follow those that are there; after `{"$patch": "replace"}` only those of the patch."""
    replaced = {_DIRECTIVE: "replace"} in change
    found = {} if replaced else {member.get(key): member for member in base}
    for member in change:
        if member == {_DIRECTIVE: "replace"}:
            continue
        if not isinstance(member, Mapping) or key not in member:
            raise InputError(f"{path}: {member!r} must be a table with the key {key}, by which members of this list are told apart")
        name = member[key]
        if _deleted(member):
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), member, f"{path}[{name}]")
    return list(found.values())


def _deleted(value: object) -> bool:
    return isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, Sequence) and not isinstance(value, str) else "a single value"
