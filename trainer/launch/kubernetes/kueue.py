"""Asks Kueue why it has not started a job. Imports no torch."""

from collections.abc import Sequence

import urllib3
from kubernetes.client.exceptions import ApiException

from trainer.launch.kubernetes.cluster import Cluster, Object
from trainer.launch.kubernetes.pods import QUEUE_LABEL

_GROUP, _VERSIONS = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
_JOB_UID = f"{_GROUP}/job-uid"


def why_queued(cluster: Cluster, found: Object) -> str:
    """Returns why Kueue has not started a suspended job; "" if it says nothing, or has not been asked to."""
    queue = found["metadata"].get("labels", {}).get(QUEUE_LABEL)
    if queue is None:
        return ""
    workloads = _workloads(cluster, str(found["metadata"]["uid"]))
    if workloads is None:
        return ""
    if not workloads:
        return f"{queue}: Kueue does not know the job (does it run, and watch this namespace?)"
    conditions = workloads[-1].get("status", {}).get("conditions", [])
    waits = [each for each in conditions if each["type"] == "QuotaReserved" and each["status"] == "False"]
    return f"{queue}: {waits[0].get('message', '')}" if waits else ""


def _workloads(cluster: Cluster, uid: str) -> Sequence[Object] | None:
    """Returns Kueue's objects about the job of this uid; None where they cannot be read."""
    for version in _VERSIONS:
        try:
            answer = cluster.custom.list_namespaced_custom_object(
                _GROUP, version, cluster.namespace, "workloads", label_selector=f"{_JOB_UID}={uid}"
            )
        except ApiException as problem:
            if problem.status != 404:
                return None
        except urllib3.exceptions.HTTPError:
            return None
        else:
            items: Sequence[Object] = answer["items"]
            return items
    return None
