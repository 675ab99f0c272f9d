"""Creates the objects of a manifest, after a dry run on the API server. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

from kubernetes.client.exceptions import ApiException

from trainer.errors import ClusterError
from trainer.launch.kubernetes.cluster import GROUP, PLURAL, VERSION, Cluster, Object, lacks_permission, warn
from trainer.launch.kubernetes.manifest import beside_name

_DRY_RUN = {"dry_run": "All"}
_BESIDE = {"ConfigMap": ("core", "config_map"), "NetworkPolicy": ("networking", "network_policy")}
"""Objects beside an MPIJob: kind -> the client's API that has it, its name in the client's methods."""
_OTHERWISE = {
    "NetworkPolicy": (
        "set kubernetes.network_policy = false: then anything that reaches the pods may connect to them"
    ),
}
"""Kind -> advice for a job that does without it."""


def is_ours(item: Object) -> bool:
    """Returns whether Clipship rendered the object."""
    return bool(item["metadata"].get("labels", {}).get("app.kubernetes.io/name") == "clipship")


def try_all(cluster: Cluster, beside: Sequence[Object], mpijob: Object, *, taken: bool) -> None:
    """Try every object on the server without keeping it, and a pod of each kind.

    The operator would create such pods later.

    `taken` says that an ended MPIJob still has the name; the new one is then tried under another name. Raises
    ClusterError for what is refused: schema, quota, pod security, unknown priority class or service account,
    missing claims.
    """
    for item in beside:
        _put(cluster, item, **_DRY_RUN)
    with cluster.asking("create the MPIJob"):
        tried = _renamed(mpijob, mpijob["metadata"]["name"]) if taken else mpijob
        cluster.custom.create_namespaced_custom_object(
            GROUP, VERSION, cluster.namespace, PLURAL, tried, **_DRY_RUN
        )
    for role, spec in mpijob["spec"]["mpiReplicaSpecs"].items():
        _try_pod(cluster, mpijob["metadata"]["name"], role, spec["template"])
    missing = list(_missing(cluster, mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]))
    if missing:
        raise ClusterError(
            f"namespace {cluster.namespace} has no {' and no '.join(missing)}: create it, or "
            "correct [kubernetes]"
        )


def create(cluster: Cluster, beside: Sequence[Object], mpijob: Object) -> str:
    """Create the objects; returns the MPIJob's uid.

    The objects beside it exist before its pods do, and are deleted together with it.
    """
    for item in beside:
        _put(cluster, item)
    with cluster.asking("create the MPIJob"):
        created = cluster.custom.create_namespaced_custom_object(
            GROUP, VERSION, cluster.namespace, PLURAL, mpijob
        )
    for item in beside:
        _hand_over(cluster, item["kind"], created)
    return str(created["metadata"]["uid"])


def adopt_what_kubectl_made(cluster: Cluster, mpijob: Object) -> None:
    """Make the MPIJob the owner of the objects beside it, so that they are deleted together with it.

    `kubectl apply` left them without an owner. Objects that the user may not change are left alone.
    """
    for kind in _BESIDE:
        with suppress(ClusterError):
            _hand_over(cluster, kind, mpijob)


def _hand_over(cluster: Cluster, kind: str, mpijob: Object) -> None:
    """Make the MPIJob the owner of its object of this kind.

    Kubernetes then deletes that object with it.
    """
    metadata, name = mpijob["metadata"], beside_name(mpijob["metadata"]["name"])
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "MPIJob",
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    with cluster.asking(f"hand the {kind} to the MPIJob"):
        item = _read(cluster, kind, name)
        if item is not None and is_ours(item) and item["metadata"].get("ownerReferences") != [owner]:
            _method(cluster, kind, "patch")(
                name, cluster.namespace, {"metadata": {"ownerReferences": [owner]}}
            )


def _put(cluster: Cluster, wanted: Object, **options: Any) -> None:
    """Create the object, or replace an earlier one of Clipship.

    Raises ClusterError if another's object has the name.
    """
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    with cluster.asking(f"create the {kind}", _OTHERWISE.get(kind, "")):
        try:
            _method(cluster, kind, "create")(cluster.namespace, wanted, **options)
        except ApiException as problem:
            if problem.status != 409:
                raise
            existing = _read(cluster, kind, name)
            if existing is None:  # an earlier object was being deleted
                _method(cluster, kind, "create")(cluster.namespace, wanted, **options)
                return
            if not is_ours(existing):
                raise ClusterError(
                    f"namespace {cluster.namespace} has a {kind} {name} that Clipship did not make: choose "
                    "another name with --set kubernetes.name=..."
                ) from None
            _method(cluster, kind, "replace")(name, cluster.namespace, wanted, **options)


def _read(cluster: Cluster, kind: str, name: str) -> Object | None:
    """Returns the object as the API server has it; None if there is none of this name."""
    try:
        return cluster.plain(_method(cluster, kind, "read")(name, cluster.namespace))
    except ApiException as problem:
        if problem.status == 404:
            return None
        raise


def _method(cluster: Cluster, kind: str, verb: str) -> Callable[..., Any]:
    """Returns the client's method for this verb and kind."""
    part, noun = _BESIDE[kind]
    method: Callable[..., Any] = getattr(getattr(cluster, part), f"{verb}_namespaced_{noun}")
    return method


def _renamed(item: Object, beginning: str) -> Object:
    """Returns a copy of the object for which the server chooses the name."""
    metadata = {key: value for key, value in item.get("metadata", {}).items() if key != "name"}
    return deepcopy(item) | {"metadata": {**metadata, "generateName": f"{beginning}-"}}


def _try_pod(cluster: Cluster, name: str, role: str, template: Object) -> None:
    pod = _renamed(template, f"{name}-{role.lower()}") | {"apiVersion": "v1", "kind": "Pod"}
    pod["spec"]["restartPolicy"] = "Never"
    with cluster.asking(f"create a {role.lower()} pod"):
        try:
            cluster.core.create_namespaced_pod(cluster.namespace, pod, **_DRY_RUN)
        except ApiException as problem:
            if not lacks_permission(problem):
                raise
            warn(
                "you lack the permission to create pods, so they could not be tried: whether the cluster "
                "accepts them shows when the operator creates them"
            )


def _missing(cluster: Cluster, pod: Object) -> Iterator[str]:
    """Yields claims, Secrets and ConfigMaps that the pods name and the namespace lacks.

    Pods without them would wait forever.
    """
    core, own = (
        cluster.core,
        {volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "job"},
    )
    sources = pod["containers"][0]
    refs = [variable.get("valueFrom", {}) for variable in sources.get("env", [])] + sources.get("envFrom", [])
    wanted: list[tuple[str, str, Callable[..., Any]]] = [
        (
            "PersistentVolumeClaim",
            volume["persistentVolumeClaim"]["claimName"],
            core.read_namespaced_persistent_volume_claim,
        )
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    for ref in refs:
        wanted += [
            ("Secret", ref[key]["name"], core.read_namespaced_secret)
            for key in ("secretKeyRef", "secretRef")
            if key in ref
        ]
        wanted += [
            ("ConfigMap", ref[key]["name"], core.read_namespaced_config_map)
            for key in ("configMapKeyRef", "configMapRef")
            if key in ref
        ]
    wanted += [
        ("Secret", secret["name"], core.read_namespaced_secret) for secret in pod.get("imagePullSecrets", [])
    ]
    for kind, name, read in dict.fromkeys(wanted):
        if name not in own and not _there(cluster, name, read):
            yield f"{kind} {name}"


def _there(cluster: Cluster, name: str, read: Callable[..., Any]) -> bool:
    """Returns whether the object exists; True also if the user may not read it."""
    with cluster.asking(f"look for {name}"):
        try:
            read(name, cluster.namespace)
        except ApiException as problem:
            return bool(problem.status != 404)
    return True
