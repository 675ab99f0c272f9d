"""State of a job's object in rows for people: conditions, pods, important events, and the run's progress.

Imports no torch.
"""

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Any

import urllib3
from kubernetes.client.exceptions import ApiException

from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.kind import QUEUE_LABEL, Kind, Object
from trainer.text.wording import duration, many

Row = tuple[str, str]

_STEP = re.compile(r"(step +\d+/\d+ .*samples/s).*?(ETA \S+)?\s*$")
_TAIL_LINES = 400
_SHOWN = 5
_UNHEARD_S = 30.0
_KUEUE, _VERSIONS = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
_JOB_UID = f"{_KUEUE}/job-uid"


def rows(cluster: Cluster, row: type[Kind], name: str, found: Object | None, *, visible: bool) -> list[Row]:
    """Returns topic and text of each row about the object; `found` None means that it no longer exists.

    `visible` says that the run folder is on this machine and shows the progress itself.
    """
    if found is None:
        unknown = [] if visible else [("step", "unknown: the run folder is on the pods' volume, not here")]
        return [
            ("state", f"gone: {row.kind} {cluster.namespace}/{name} does not exist (cancelled or deleted)"),
            *unknown,
        ]
    pods = pods_of(cluster, row, name)
    output = output_pods(row, pods)
    launchers = output if not row.keeps_going else []
    workers = [pod for pod in pods if pod not in launchers]
    result = [("state", state(row, found, pods))]
    if is_suspended(found) and (why := why_queued(cluster, found)):
        result.append(("queue", why))
    result += (_messages(output) or _messages(pods)) if row.keeps_going else _launcher(launchers)
    result += [("workers", _workers(row.workers(found), workers))]
    result += [("pod", text) for text in _troubled(workers)]
    result += [("event", text) for text in _events(cluster, row, name, pods, found)]
    return result if visible else result + _progress(cluster, output)


def pods_of(cluster: Cluster, row: type[Kind], name: str) -> list[Object]:
    """Returns the object's pods as JSON, oldest first."""
    with cluster.asking("list the pods"):
        answer = cluster.ask("get", "v1", "pods", labelSelector=f"{row.pod_label}={name}")
    return sorted(answer["items"], key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def output_pods(row: type[Kind], pods: Sequence[Object]) -> list[Object]:
    """Returns those of the pods whose logs are the run's output."""
    return [pod for pod in pods if row.output.items() <= pod["metadata"]["labels"].items()]


def state(row: type[Kind], found: Object, pods: Sequence[Object] = ()) -> str:
    """Returns the state in one word, with its time and reason."""
    true = row.conditions(found)
    if "deletionTimestamp" in found["metadata"]:
        return "ending: it was cancelled, and its ranks save"
    if at := row.ended_at(found):
        good = true.get(row.succeeded)
        return f"{'succeeded' if good else 'failed'}, {_ago(at)} ago{_why(good or true.get('Failed'))}"
    if "Suspended" in true or is_suspended(found):
        return "suspended: it waits for Kueue, or somebody suspended it"
    if phase := row.phase(found) or _pods_phase(pods):
        word, since = phase
        return f"{word}, for {_ago(since)}{_why(true.get('Failed')) if word == 'failing' else ''}"
    silent = _seconds(found["metadata"]["creationTimestamp"]) > _UNHEARD_S
    return f"waiting: {row.controller} has not started it yet" + (
        " (does the operator run, and watch this namespace?)" if silent else ""
    )


def _pods_phase(pods: Sequence[Object]) -> tuple[str, str] | None:
    """Returns what the pods do: in Kubeflow Trainer v2.0 a TrainJob's status is empty until it ends."""
    if not pods:
        return None
    return "running" if any(map(_ready, pods)) else "waiting", str(pods[0]["metadata"]["creationTimestamp"])


def is_suspended(found: Object) -> bool:
    """Returns whether the object asks for no pods for now, as its queue or somebody wants it."""
    return bool(found["spec"].get("runPolicy", found["spec"]).get("suspend"))


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
            found: Sequence[Object] = cluster.ask(
                "get", f"{_KUEUE}/{version}", "workloads", labelSelector=f"{_JOB_UID}={uid}"
            )["items"]
        except ApiException as problem:
            if problem.status != 404:
                return None
        except urllib3.exceptions.HTTPError:
            return None
        else:
            return found
    return None


def _why(condition: Object | None) -> str:
    return (
        f": {condition['message']}"
        if condition and condition.get("message") and condition["type"] == "Failed"
        else ""
    )


def _launcher(launchers: Sequence[Object]) -> list[Row]:
    if not launchers:
        return [("launcher", "none yet: it starts when all workers are ready")]
    newest = launchers[-1]
    lost = f", number {len(launchers)} of this job" if len(launchers) > 1 else ""
    result = [("launcher", f"{newest['metadata']['name']}, {_phase(newest)}{lost}")]
    return result + _messages(launchers)


def _messages(pods: Sequence[Object]) -> list[Row]:
    """Returns the last words of the last two of the pods that have said why they ended."""
    messages = [text for pod in pods if (text := _termination_message(pod))]
    return [("message", text) for text in messages[-2:]]


def _termination_message(pod: Object) -> str:
    """Returns the termination message of the pod's container in one line; "" if there is none."""
    for container in pod["status"].get("containerStatuses", []):
        ended = container["state"].get("terminated") or container.get("lastState", {}).get("terminated") or {}
        if ended.get("message"):
            return f"exit code {ended['exitCode']}: {ended['message'].strip().splitlines()[-1]}"
    return ""


def _workers(wanted: int, workers: Sequence[Object]) -> str:
    ready = sum(_ready(pod) for pod in workers)
    restarts = sum(
        container.get("restartCount", 0)
        for pod in workers
        for container in pod["status"].get("containerStatuses", [])
    )
    return f"{ready} of {wanted} ready" + (
        f", containers restarted {many(restarts, 'time')}" if restarts else ""
    )


def _troubled(workers: Sequence[Object]) -> Iterator[str]:
    """Yields the pods that are not ready, with the reason that Kubernetes gives."""
    waiting = [pod for pod in workers if not _ready(pod) and pod["status"].get("phase") != "Succeeded"]
    for pod in waiting[:_SHOWN]:
        yield f"{pod['metadata']['name']}: {_phase(pod)}{_reason(pod)}"
    if len(waiting) > _SHOWN:
        yield f"and {len(waiting) - _SHOWN} more that are not ready"


def _reason(pod: Object) -> str:
    status = pod["status"]
    reasons = [
        container["state"]["waiting"]
        for container in status.get("containerStatuses", [])
        if container["state"].get("waiting")
    ]
    reasons += [
        condition
        for condition in status.get("conditions", [])
        if condition["type"] == "PodScheduled" and condition["status"] != "True"
    ]
    reasons += [status] if status.get("reason") else []
    texts = [
        ": ".join(text for text in (reason.get("reason"), reason.get("message")) if text)
        for reason in reasons
    ]
    return f", {texts[0]}" if texts else ""


def _events(cluster: Cluster, row: type[Kind], name: str, pods: Sequence[Object], found: Object) -> list[str]:
    """Returns warnings about the object, what its controller made and its pods, the newest last.

    Returns none if the user may not read events.
    """
    about = {name, *(name + suffix for suffix in row.makes), *(pod["metadata"]["name"] for pod in pods)}
    try:
        events = cluster.ask("get", "v1", "events", fieldSelector="type=Warning")["items"]
    except (ApiException, urllib3.exceptions.HTTPError):
        return []
    born = str(found["metadata"]["creationTimestamp"])
    ours = [
        event for event in events if event["involvedObject"].get("name") in about and _when(event) >= born
    ]
    ours.sort(key=_when)
    texts = [
        f"{event['involvedObject']['name']}: {event.get('reason')}: {_one_line(event.get('message'))}"
        for event in ours
    ]
    return list(dict.fromkeys(texts))[-_SHOWN:]


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"])


def _progress(cluster: Cluster, output: Sequence[Object]) -> list[Row]:
    """Returns the run's progress from rank 0's last output."""
    for pod in reversed(output):
        try:
            text = cluster.core.read_namespaced_pod_log(
                pod["metadata"]["name"], cluster.namespace, tail_lines=_TAIL_LINES
            )
        except (ApiException, urllib3.exceptions.HTTPError):
            continue
        matches = [match for line in str(text).splitlines() if (match := _STEP.search(line))]
        if matches:
            step, eta = matches[-1].groups()
            return [("step", f"{step}{', ' + eta if eta else ''}")]
    return [("step", "none: no step is logged yet")]


def _phase(pod: Object) -> str:
    return (
        "ending"
        if "deletionTimestamp" in pod["metadata"]
        else str(pod["status"].get("phase", "Unknown")).lower()
    )


def _ready(pod: Object) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod["status"].get("conditions", [])
    )


def _one_line(text: Any) -> str:
    return " ".join(str(text or "").split())[:300]


def _seconds(stamp: str) -> float:
    then = datetime.datetime.fromisoformat(str(stamp).replace("Z", "+00:00"))
    return (datetime.datetime.now(datetime.UTC) - then).total_seconds()


def _ago(stamp: str) -> str:
    return duration(max(0.0, _seconds(stamp)))
