"""Creates what a manifest holds, after the API server has tried it. No torch."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from kubernetes.client.exceptions import ApiException

from trainer.errors import ClusterError
from trainer.launch.kubernetes.cluster import GROUP, PLURAL, VERSION, Cluster, Object, may_not, warn

_TRY = {"dry_run": "All"}


def is_ours(found: Object) -> bool:
    """Whether Clipship rendered it."""
    return bool(found["metadata"].get("labels", {}).get("app.kubernetes.io/name") == "clipship")


def try_all(cluster: Cluster, config_map: Object, mpijob: Object, *, taken: bool) -> None:
    """A server-side dry run of every object, and of a pod of each kind, which the operator would create only later.

    `taken`: an ended MPIJob has the name until this one is made, which is therefore tried under another.

    Raises ClusterError for what is refused: schema, quota, pod security, unknown priority class or service account, missing claims.
    """
    with cluster.asking("create the ConfigMap"):
        _put_config_map(cluster, config_map, **_TRY)
    with cluster.asking("create the MPIJob"):
        tried = _renamed(mpijob, mpijob["metadata"]["name"]) if taken else mpijob
        cluster.custom.create_namespaced_custom_object(GROUP, VERSION, cluster.namespace, PLURAL, tried, **_TRY)
    for role, spec in mpijob["spec"]["mpiReplicaSpecs"].items():
        _try_pod(cluster, mpijob["metadata"]["name"], role, spec["template"])
    missing = list(_missing(cluster, mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]))
    if missing:
        raise ClusterError(f"namespace {cluster.namespace} has no {' and no '.join(missing)}: create it, or correct [kubernetes]")


def create(cluster: Cluster, config_map: Object, mpijob: Object) -> str:
    """Returns the MPIJob's uid. The ConfigMap goes when the MPIJob does."""
    with cluster.asking("create the ConfigMap"):
        _put_config_map(cluster, config_map)
    with cluster.asking("create the MPIJob"):
        made = cluster.custom.create_namespaced_custom_object(GROUP, VERSION, cluster.namespace, PLURAL, mpijob)
    metadata = made["metadata"]
    owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "MPIJob", "name": metadata["name"], "uid": metadata["uid"]}
    with cluster.asking("hand the ConfigMap to the MPIJob"):
        name = config_map["metadata"]["name"]
        cluster.core.patch_namespaced_config_map(name, cluster.namespace, {"metadata": {"ownerReferences": [owner]}})
    return str(metadata["uid"])


def _put_config_map(cluster: Cluster, config_map: Object, **options: Any) -> None:
    try:
        cluster.core.create_namespaced_config_map(cluster.namespace, config_map, **options)
    except ApiException as problem:
        if problem.status != 409:
            raise
        name = config_map["metadata"]["name"]
        if not is_ours(cluster.plain(cluster.core.read_namespaced_config_map(name, cluster.namespace))):
            raise ClusterError(
                f"namespace {cluster.namespace} has a ConfigMap {name}, not Clipship's: take another name with --set kubernetes.name=..."
            ) from None
        cluster.core.replace_namespaced_config_map(name, cluster.namespace, config_map, **options)


def _renamed(found: Object, beginning: str) -> Object:
    """A copy whose name the server makes up."""
    metadata = {key: value for key, value in found.get("metadata", {}).items() if key != "name"}
    return deepcopy(found) | {"metadata": {**metadata, "generateName": f"{beginning}-"}}


def _try_pod(cluster: Cluster, name: str, role: str, template: Object) -> None:
    pod = _renamed(template, f"{name}-{role.lower()}") | {"apiVersion": "v1", "kind": "Pod"}
    pod["spec"]["restartPolicy"] = "Never"
    with cluster.asking(f"create a {role.lower()} pod"):
        try:
            cluster.core.create_namespaced_pod(cluster.namespace, pod, **_TRY)
        except ApiException as problem:
            if not may_not(problem):
                raise
            warn("you may not create pods here, which the operator will: whether they are allowed shows only then")


def _missing(cluster: Cluster, pod: Object) -> Iterator[str]:
    """Claims, Secrets and ConfigMaps that the pods name and the namespace lacks: such pods would wait for ever."""
    core, own = cluster.core, {volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "job"}
    sources = pod["containers"][0]
    refs = [variable.get("valueFrom", {}) for variable in sources.get("env", [])] + sources.get("envFrom", [])
    wanted: list[tuple[str, str, Callable[..., Any]]] = [
        ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], core.read_namespaced_persistent_volume_claim)
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    for ref in refs:
        wanted += [("Secret", ref[key]["name"], core.read_namespaced_secret) for key in ("secretKeyRef", "secretRef") if key in ref]
        wanted += [
            ("ConfigMap", ref[key]["name"], core.read_namespaced_config_map) for key in ("configMapKeyRef", "configMapRef") if key in ref
        ]
    wanted += [("Secret", secret["name"], core.read_namespaced_secret) for secret in pod.get("imagePullSecrets", [])]
    for kind, name, read in dict.fromkeys(wanted):
        if name not in own and not _there(cluster, name, read):
            yield f"{kind} {name}"


def _there(cluster: Cluster, name: str, read: Callable[..., Any]) -> bool:
    """True also where the user may not look."""
    with cluster.asking(f"look for {name}"):
        try:
            read(name, cluster.namespace)
        except ApiException as problem:
            return bool(problem.status != 404)
    return True
