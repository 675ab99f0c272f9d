"""Submit, status, logs and cancel for Kubernetes, as `trainer.launch.submission.Scheduler` requires them.

Imports no torch.
"""

import datetime
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import Job
from trainer.errors import ClusterError, InputError
from trainer.launch.kubernetes.manifest import manifest, mpijob_name
from trainer.launch.kubernetes.validate import on_volume, validate, warnings
from trainer.launch.submission import Submission, make_artefacts_folder, record
from trainer.run.folder import run_folder
from trainer.run.layout import ARTEFACTS, JOB_FILE, LOGS
from trainer.safe_io.atomic import write_whole

if TYPE_CHECKING:
    from trainer.launch.kubernetes.cluster import Cluster, Object

MANIFEST = "kubernetes.yaml"
_GONE_S = 120.0
_POLL_S = 0.5
_RENAME = "--set name=... or --set kubernetes.name=..."


def prepare(job: Job, check: bool) -> Path:
    """Make the folder that keeps what was submitted, and return it.

    It is the run folder if this machine has its volume too, else a folder in ./runs. `check` has no effect:
    the ranks see the pods' files, and check them when they start. Raises InputError for what cannot work.
    """
    from trainer.launch.kubernetes.cluster import warn

    validate(job)
    for text in warnings(job):
        warn(text)
    return _prepare_folder(job)


def _prepare_folder(job: Job) -> Path:
    """Make `record_folder` and return it. Raises InputError if it cannot be made."""
    folder = record_folder(job)
    make_artefacts_folder(folder, "submit from a folder in which you may write")
    if os.geteuid() == 0 and folder == run_folder(job):
        for made in (folder, folder / ARTEFACTS):
            os.chown(made, job.kubernetes.run_as_user, -1)  # the ranks write there too
    return folder


def record_folder(job: Job) -> Path:
    """Returns the folder that `prepare` makes, whether it exists or not."""
    mount = on_volume(job.logging.runs, job)
    here = mount is not None and os.path.isdir(mount.path) and os.access(_nearest(run_folder(job)), os.W_OK)
    return run_folder(job) if here else Path("runs", job.name)


def submit(job: Job, folder: Path) -> Submission:
    """Submit the job after a dry run of every object on the server.

    A refusal thus leaves nothing half submitted.
    """
    import yaml

    from trainer.launch.kubernetes.cluster import connect
    from trainer.launch.kubernetes.objects import create, try_all

    text = manifest(job)
    write_whole(folder / ARTEFACTS / MANIFEST, text, private=True)
    *beside, mpijob = yaml.safe_load_all(text)
    cluster, name = connect(job.kubernetes.namespace), mpijob["metadata"]["name"]
    ended = _ended_before(cluster, name)
    try_all(cluster, beside, mpijob, taken=ended)
    if ended:
        _delete(cluster, name)
    uid = create(cluster, beside, mpijob)
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return _submission(cluster, name, uid, at)


def adopt(job: Job, folder: Path | None) -> tuple[Path, Submission] | None:
    """Record the job's MPIJob that `kubectl` made, and return it with its folder; None if there is none.

    If the run has a folder, it must be the one that `record_folder` names. Raises ClusterError and
    InputError.
    """
    from trainer.launch.kubernetes.cluster import connect
    from trainer.launch.kubernetes.objects import is_ours

    if folder not in (None, record_folder(job)):
        return None
    cluster = connect(job.kubernetes.namespace)
    mpijob = cluster.mpijob(mpijob_name(job))
    if mpijob is None or not is_ours(mpijob):
        return None
    metadata = mpijob["metadata"]
    submission = _submission(cluster, metadata["name"], metadata["uid"], metadata["creationTimestamp"])
    folder = _prepare_folder(job)
    record(folder, submission)
    return folder, submission


def _submission(cluster: "Cluster", name: str, uid: str, at: str) -> Submission:
    details = {"context": cluster.context, "namespace": cluster.namespace, "name": name, "uid": uid}
    return Submission("kubernetes", f"{cluster.namespace}/{name}", at, details)


def status(folder: Path, submission: Submission) -> list[tuple[str, str]]:
    """Returns rows with state, pods and important events.

    If the run folder is not on this machine, the run's step is read from the launcher's log.
    """
    from trainer.launch.kubernetes.state import rows

    cluster, name = _cluster(submission), submission.details["name"]
    mpijob = cluster.mpijob(name)
    if replaced := _replaced(mpijob, submission):
        return [("state", f"gone: {replaced}")]
    return rows(cluster, name, mpijob, visible=(folder / JOB_FILE).exists())


def cancel(folder: Path, submission: Submission) -> str:
    """Delete the MPIJob and return a sentence about it.

    Kubernetes asks its pods to stop, and they save first.
    """
    from trainer.launch.kubernetes.cluster import GROUP, PLURAL, VERSION
    from trainer.launch.kubernetes.objects import adopt_what_kubectl_made

    cluster, name = _cluster(submission), submission.details["name"]
    mpijob = cluster.mpijob(name)
    if mpijob is None:
        return f"MPIJob {submission.id} does not exist any more"
    if replaced := _replaced(mpijob, submission):
        return f"{replaced}; nothing is deleted"
    grace = mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"].get(
        "terminationGracePeriodSeconds", 30
    )
    ended = bool(mpijob.get("status", {}).get("completionTime"))
    adopt_what_kubectl_made(cluster, mpijob)
    with cluster.asking(f"delete the MPIJob {name}"):
        cluster.custom.delete_namespaced_custom_object(
            GROUP, VERSION, cluster.namespace, PLURAL, name, propagation_policy="Background"
        )
    if ended:
        return f"MPIJob {submission.id} had ended; it is deleted, together with its pods' logs"
    return f"MPIJob {submission.id} is deleted; its ranks save and exit within {grace} s (kubernetes.grace_s)"


def log_lines(folder: Path, submission: Submission, rank: int | None, follow: bool) -> Iterator[str] | None:
    """Returns the launcher's log, which has the output of all ranks, or one rank's file from its pod.

    Returns None if the rank's file is in the run folder on this machine.
    """
    from trainer.launch.kubernetes.pod_logs import launcher_lines, rank_lines

    if rank is not None and (folder / LOGS).is_dir():
        return None
    cluster, name = _cluster(submission), submission.details["name"]
    if replaced := _replaced(cluster.mpijob(name), submission):
        raise InputError(f"{replaced}; the logs of this run's pods were deleted with them")
    return launcher_lines(cluster, name, follow) if rank is None else rank_lines(cluster, name, rank, follow)


def _replaced(mpijob: "Object | None", submission: Submission) -> str:
    """Returns a sentence if the MPIJob of this name belongs to another run, else ""."""
    if mpijob is None or mpijob["metadata"]["uid"] == submission.details["uid"]:
        return ""
    return (
        f"the MPIJob of this run was deleted; {submission.id} is now another MPIJob of the same name, "
        "submitted later"
    )


def _cluster(submission: Submission) -> "Cluster":
    from trainer.launch.kubernetes.cluster import connect

    known = submission.details
    return connect(known["namespace"], None if known["context"].startswith("the pod") else known["context"])


def _ended_before(cluster: "Cluster", name: str) -> bool:
    """Returns whether an ended MPIJob of Clipship has the name.

    Waits for one that is being deleted. Raises InputError for one that has not ended or is not Clipship's.
    """
    from trainer.launch.kubernetes.objects import is_ours

    mpijob = cluster.mpijob(name)
    if mpijob is None or "deletionTimestamp" in mpijob["metadata"]:
        _until_gone(cluster, name)  # its pods may still be saving
        return False
    exists = f"MPIJob {cluster.namespace}/{name} already exists and"
    if not is_ours(mpijob):
        raise InputError(f"{exists} is not Clipship's: choose another name with {_RENAME}")
    if not mpijob.get("status", {}).get("completionTime"):
        raise InputError(
            f"{exists} has not ended: `clipship cancel` it, or choose another name with {_RENAME}"
        )
    return True


def _delete(cluster: "Cluster", name: str) -> None:
    from trainer.launch.kubernetes.cluster import GROUP, PLURAL, VERSION
    from trainer.launch.kubernetes.objects import adopt_what_kubectl_made

    if (ended := cluster.mpijob(name)) is not None:
        adopt_what_kubectl_made(cluster, ended)
    with cluster.asking(f"delete the ended MPIJob {name}"):
        cluster.custom.delete_namespaced_custom_object(
            GROUP, VERSION, cluster.namespace, PLURAL, name, propagation_policy="Foreground"
        )
    _until_gone(cluster, name)


def _until_gone(cluster: "Cluster", name: str) -> None:
    deadline = time.monotonic() + _GONE_S
    while cluster.mpijob(name) is not None or _pods(cluster, name):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the earlier MPIJob {name} is still being deleted after {_GONE_S:g} s, because its pods are "
                "saving: try again later"
            )
        time.sleep(_POLL_S)


def _pods(cluster: "Cluster", name: str) -> list[Any]:
    from trainer.launch.kubernetes.state import pods_of

    return pods_of(cluster, name)


def _nearest(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())
