"""Creates the objects of a manifest, after a dry run on the API server. Imports no torch."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass

from kubernetes.client.exceptions import ApiException

from trainer.errors import ClusterError, InputError
from trainer.launch.kubernetes.cluster import Cluster, Known, lacks_permission
from trainer.launch.kubernetes.gangs import GANGS
from trainer.launch.kubernetes.kind import Kind, Object, beside_name
from trainer.launch.kubernetes.state import pods_of
from trainer.text.terminal import say

_DRY_RUN = {"dryRun": "All", "fieldValidation": "Strict"}
_WAIT_S = 20.0
"""For a controller to see an object that has been created or to let go of a deleted one: a second at most."""
_POLL_S = 0.2
_GONE_S = 120.0
"""For the pods of an earlier object, which may be saving."""
_GONE_POLL_S = 0.5
_RENAME = "--set name=... or --set kubernetes.name=..."
ApiKind = tuple[str, str]
"""An object's apiVersion and kind."""


@dataclass(frozen=True)
class Beside:
    """One kind of the objects beside the job's own."""

    plural: str
    name: Callable[[str], str] = beside_name
    """Name of such an object, made from that of the job's own."""
    known: Known | None = None
    """The kind, if it may be missing although the cluster knows that of the job's own object."""
    otherwise: str = ""
    """Advice for a job that does without it."""


_BESIDE: dict[ApiKind, Beside] = {
    ("v1", "ConfigMap"): Beside("configmaps"),
    ("networking.k8s.io/v1", "NetworkPolicy"): Beside(
        "networkpolicies",
        otherwise="set kubernetes.network_policy = false: then anything that reaches the pods may connect to "
        "them",
    ),
    ("v1", "Service"): Beside("services", str),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): Beside("trainingruntimes"),
    **{(gang.api_version, gang.kind): Beside(gang.plural, str, gang) for gang in GANGS.values()},
}
_CLAIMS = {"persistentVolumeClaim": ("PersistentVolumeClaim", "claimName")}
_IN_VOLUMES = {"secret": ("Secret", "secretName"), "configMap": ("ConfigMap", "name")}
_IN_VARIABLES = {
    "secretKeyRef": ("Secret", "name"),
    "secretRef": ("Secret", "name"),
    "configMapKeyRef": ("ConfigMap", "name"),
    "configMapRef": ("ConfigMap", "name"),
}
"""Kind of the object that a part of a pod names, and the key that has the name."""


def is_ours(item: Object) -> bool:
    """Returns whether Clipship rendered the object."""
    return bool(item["metadata"].get("labels", {}).get("app.kubernetes.io/name") == "clipship")


def ended_before(cluster: Cluster, row: type[Kind], name: str) -> bool:
    """Returns whether an ended object of Clipship has the name.

    Waits for one that is being deleted. Raises InputError for one that has not ended or is not Clipship's.
    """
    found = cluster.read(row, name)
    if found is None or "deletionTimestamp" in found["metadata"]:
        _until_gone(cluster, row, name)  # its pods may still be saving
        return False
    exists = f"{row.kind} {cluster.namespace}/{name} already exists and"
    if not is_ours(found):
        raise InputError(f"{exists} is not Clipship's: choose another name with {_RENAME}")
    if not row.ended_at(found):
        raise InputError(
            f"{exists} has not ended: `clipship cancel` it, or choose another name with {_RENAME}"
        )
    return True


def delete_ended(cluster: Cluster, row: type[Kind], name: str) -> None:
    """Delete the ended object with what is beside it, and wait until all of it is gone."""
    if (ended := cluster.read(row, name)) is not None:
        adopt_what_kubectl_made(cluster, row, ended)
    cluster.delete(row, name, "Foreground", f"delete the ended {row.kind} {name}")
    _until_gone(cluster, row, name)


def _until_gone(cluster: Cluster, row: type[Kind], name: str) -> None:
    deadline = time.monotonic() + _GONE_S
    while cluster.read(row, name) is not None or pods_of(cluster, row, name):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the earlier {row.kind} {name} is still being deleted after {_GONE_S:g} s, because its pods "
                "are saving: try again later"
            )
        time.sleep(_GONE_POLL_S)


def try_all(
    cluster: Cluster, row: type[Kind], beside: Sequence[Object], wanted: Object, *, taken: bool
) -> None:
    """Try every object on the server without keeping it, and a pod of each kind.

    The controller would create such pods later.

    `taken` says that an ended object still has the name; the new one is then tried under another name. Raises
    ClusterError for what is refused: schema, quota, pod security, unknown priority class or service account,
    missing claims, and a field that the cluster would drop without a word.
    """
    for item in beside:
        _put(cluster, item, row, **_DRY_RUN)
    name = wanted["metadata"]["name"]
    _try_own(cluster, row, _renamed(wanted, name) if taken else wanted)
    pods = row.pods([*beside, wanted])
    for role, part in pods.items():
        _try_pod(cluster, name, role, part["template"])
    missing = list(_missing(cluster, pods["worker"]["template"]["spec"]))
    if missing:
        raise ClusterError(
            f"namespace {cluster.namespace} has no {' and no '.join(missing)}: create it, or "
            "correct [kubernetes]"
        )


def create(cluster: Cluster, row: type[Kind], beside: Sequence[Object], wanted: Object) -> str:
    """Create the objects; returns the uid of the job's own.

    The objects beside it exist before its pods do, and are deleted together with it.
    """
    for item in beside:
        _put(cluster, item, row)
    created = _create_own(cluster, row, wanted)
    for item in beside:
        _hand_over(cluster, row, api_kind(item), created)
    return str(created["metadata"]["uid"])


def _try_own(cluster: Cluster, row: type[Kind], wanted: Object) -> None:
    """Try the job's own object, while those beside it may exist in a dry run only."""
    try:
        cluster.create(row, wanted, **_DRY_RUN)
    except ClusterError as problem:
        if not _is_early(row, problem):
            raise


def _create_own(cluster: Cluster, row: type[Kind], wanted: Object) -> Object:
    """Create the job's own object, as soon as its controller has seen those beside it."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            return cluster.create(row, wanted)
        except ClusterError as problem:
            if not _is_early(row, problem) or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def _is_early(row: type[Kind], problem: ClusterError) -> bool:
    """Returns whether a controller refuses the object only since it has not seen those beside it."""
    return any(words in str(problem) for words in row.unseen)


def adopt_what_kubectl_made(cluster: Cluster, row: type[Kind], owner: Object) -> None:
    """Make the job's own object the owner of those beside it, so that they are deleted together with it.

    `kubectl apply` left them without an owner. Objects that the user may not change are left alone.
    """
    for kind in _BESIDE:
        with suppress(ClusterError):
            _hand_over(cluster, row, kind, owner)


def api_kind(item: Object) -> ApiKind:
    """Returns the object's apiVersion and kind."""
    return item["apiVersion"], item["kind"]


def _hand_over(cluster: Cluster, row: type[Kind], kind: ApiKind, owner: Object) -> None:
    """Make the job's own object the owner of its object of this kind.

    Kubernetes then deletes that object with it.
    """
    metadata = owner["metadata"]
    name = _BESIDE[kind].name(metadata["name"])
    reference = {
        "apiVersion": row.api_version,
        "kind": row.kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    with cluster.asking(f"hand the {kind[1]} to the {row.kind}"):
        item = _read(cluster, kind, name)
        if item is None or not is_ours(item) or _other_owner(item, row):
            return
        if item["metadata"].get("ownerReferences") != [reference]:
            _ask(cluster, "patch", kind, name, {"metadata": {"ownerReferences": [reference]}})


def _put(cluster: Cluster, wanted: Object, row: type[Kind], **query: str) -> None:
    """Create the object, or replace an earlier one of Clipship.

    Raises ClusterError if another's object has the name, or one of a job of another kind.
    """
    kind, name = api_kind(wanted), wanted["metadata"]["name"]
    its = _BESIDE[kind]
    with cluster.asking(f"create the {kind[1]}", its.otherwise, row=its.known or row):
        try:
            _ask(cluster, "post", kind, body=wanted, **query)
        except ApiException as problem:
            if problem.status != 409:
                raise
            existing = _staying(cluster, kind, name)
            if existing is None:  # an earlier object was being deleted
                _ask(cluster, "post", kind, body=wanted, **query)
                return
            if not is_ours(existing):
                raise ClusterError(
                    f"namespace {cluster.namespace} has a {kind[1]} {name} that Clipship did not make: "
                    "choose another name with --set kubernetes.name=..."
                ) from None
            if owner := _other_owner(existing, row):
                raise ClusterError(
                    f"the {kind[1]} {name} of namespace {cluster.namespace} belongs to the {owner}, whose "
                    "pods would get another job: delete that, or choose another name with --set "
                    "kubernetes.name=..."
                ) from None
            version = existing["metadata"]["resourceVersion"]  # some kinds are replaced only with it
            newer = {**wanted, "metadata": {**wanted["metadata"], "resourceVersion": version}}
            _ask(cluster, "put", kind, name, newer, **query)


def _other_owner(item: Object, row: type[Kind]) -> str:
    """Returns kind and name of an owner of another kind than the row's; empty if there is none."""
    owners = item["metadata"].get("ownerReferences") or ()
    own = (row.api_version.partition("/")[0], row.kind)
    others = (o for o in owners if (o["apiVersion"].partition("/")[0], o["kind"]) != own)
    return next((f"{owner['kind']} {owner['name']}" for owner in others), "")


def _staying(cluster: Cluster, kind: ApiKind, name: str) -> Object | None:
    """Returns the object; None if there is none of this name, once one that is being deleted is gone.

    Its controller may hold such an object for a while: Kubeflow Trainer a TrainingRuntime, for a second.
    """
    deadline = time.monotonic() + _WAIT_S
    while (found := _read(cluster, kind, name)) is not None and "deletionTimestamp" in found["metadata"]:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the earlier {kind[1]} {name} is still being deleted after {_WAIT_S:g} s: try again later"
            )
        time.sleep(_POLL_S)
    return found


def _read(cluster: Cluster, kind: ApiKind, name: str) -> Object | None:
    """Returns the object as the API server has it; None if there is none of this name."""
    try:
        return _ask(cluster, "get", kind, name)
    except ApiException as problem:
        if problem.status == 404:
            return None
        raise


def _ask(
    cluster: Cluster, method: str, kind: ApiKind, name: str = "", body: Object | None = None, **query: str
) -> Object:
    return cluster.ask(method, kind[0], _BESIDE[kind].plural, name, body, **query)


def _renamed(item: Object, beginning: str) -> Object:
    """Returns a copy of the object for which the server chooses the name."""
    metadata = {key: value for key, value in item.get("metadata", {}).items() if key != "name"}
    return deepcopy(item) | {"metadata": {**metadata, "generateName": f"{beginning}-"}}


def _try_pod(cluster: Cluster, name: str, role: str, template: Object) -> None:
    pod = _renamed(template, f"{name}-{role}") | {"apiVersion": "v1", "kind": "Pod"}
    pod["spec"]["restartPolicy"] = "Never"
    with cluster.asking(f"create a {role} pod"):
        try:
            cluster.ask("post", "v1", "pods", body=pod, **_DRY_RUN)
        except ApiException as problem:
            if not lacks_permission(problem):
                raise
            say(
                "warning: you lack the permission to create pods, so they could not be tried: whether the "
                "cluster accepts them shows when the controller creates them"
            )


def _missing(cluster: Cluster, pod: Object) -> Iterator[str]:
    """Yields claims, Secrets and ConfigMaps that the pods name and the namespace lacks.

    Pods without them would wait forever.
    """
    own = {volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "job"}
    for kind, name in dict.fromkeys(_named_objects(pod)):
        if name not in own and not _there(cluster, kind, name):
            yield f"{kind} {name}"


def _named_objects(pod: Object) -> Iterator[tuple[str, str]]:
    """Yields the kind and the name of each object that the pod needs; an object may come again."""
    container = pod["containers"][0]
    refs = [variable.get("valueFrom", {}) for variable in container.get("env", [])]
    refs += container.get("envFrom", [])
    for places, keys in ((pod["volumes"], _CLAIMS), (pod["volumes"], _IN_VOLUMES), (refs, _IN_VARIABLES)):
        for place in places:
            yield from ((kind, place[key][name]) for key, (kind, name) in keys.items() if key in place)
    yield from (("Secret", secret["name"]) for secret in pod.get("imagePullSecrets", []))


def _there(cluster: Cluster, kind: str, name: str) -> bool:
    """Returns whether the object exists; True also if the user may not read it."""
    with cluster.asking(f"look for {name}"):
        try:
            cluster.ask("get", "v1", f"{kind.lower()}s", name)
        except ApiException as problem:
            return bool(problem.status != 404)
    return True
