"""Kubernetes for `clipship render`, `check`, `submit`, `status`, `logs` and `cancel`.

Imports no torch.
"""

import datetime
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.comm.backends import Launcher
from trainer.config import Job
from trainer.errors import InputError
from trainer.launch.kubernetes import validate
from trainer.launch.kubernetes.kind import Kind, Object, run_name
from trainer.launch.kubernetes.kinds import KINDS, kind_of
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.kubernetes.places import on_volume
from trainer.launch.submission import Outcome, Scheduler, Submission, make_artefacts_folder, record
from trainer.run.folder import run_folder
from trainer.run.layout import ARTEFACTS, JOB_FILE, LOGS
from trainer.safe_io.atomic import write_whole
from trainer.text.paste import command

if TYPE_CHECKING:
    from trainer.launch.kubernetes.cluster import Cluster

MANIFEST = "kubernetes.yaml"


class KubernetesScheduler(Scheduler):
    """Objects of [kubernetes]."""

    same_files = False

    def render(self, job: Job) -> str:
        return manifest(job)

    def validate(self, job: Job) -> None:
        validate.validate(job)

    def starter(self, job: Job) -> str:
        return kind_of(job).starter

    def launcher(self, job: Job) -> Launcher:
        return kind_of(job).launcher

    def warnings(self, job: Job) -> Iterator[str]:
        return validate.warnings(job)

    def summary(self, job: Job) -> str:
        return validate.summary(job)

    def unique_name(self, job: Job) -> str:
        return run_name(job)

    def prepare(self, job: Job) -> Path:
        """Make the folder that keeps what was submitted, and return it.

        It is the run folder if this machine has its volume too, else a folder in ./runs. Raises InputError if
        it cannot be made.
        """
        folder = self.record_folder(job)
        make_artefacts_folder(folder, "submit from a folder in which you may write")
        if os.geteuid() == 0 and folder == run_folder(job):
            for made in (folder, folder / ARTEFACTS):
                os.chown(made, job.kubernetes.run_as_user, -1)  # the ranks write there too
        return folder

    def record_folder(self, job: Job) -> Path:
        """Returns the folder that `prepare` makes, whether it exists or not."""
        mount = on_volume(job.logging.runs, job)
        here = (
            mount is not None and os.path.isdir(mount.path) and os.access(_nearest(run_folder(job)), os.W_OK)
        )
        return run_folder(job) if here else Path("runs", job.name)

    def submit(self, job: Job, folder: Path) -> Submission:
        """Submit the job after a dry run of every object on the server.

        A refusal thus leaves nothing half submitted.
        """
        import yaml

        from trainer.launch.kubernetes.cluster import connect
        from trainer.launch.kubernetes.objects import create, delete_ended, ended_before, try_all

        text = manifest(job)
        write_whole(folder / ARTEFACTS / MANIFEST, text, private=True)
        *beside, wanted = yaml.safe_load_all(text)
        row, cluster, name = kind_of(job), connect(job.kubernetes.namespace), wanted["metadata"]["name"]
        ended = ended_before(cluster, row, name)
        try_all(cluster, row, beside, wanted, taken=ended)
        if ended:
            delete_ended(cluster, row, name)
        uid = create(cluster, row, beside, wanted)
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return _submission(cluster, row, name, uid, at)

    def adopt(self, job: Job, folder: Path | None) -> tuple[Path, Submission] | None:
        """Record the job's object that `kubectl` made, and return it with its folder; None if there is none.

        If the run has a folder, it must be the one that `record_folder` names. One that may not be written
        gets no record, and the object is looked for again. Raises ClusterError and InputError.
        """
        from trainer.launch.kubernetes.cluster import connect
        from trainer.launch.kubernetes.objects import is_ours

        if folder not in (None, self.record_folder(job)):
            return None
        cluster, row = connect(job.kubernetes.namespace), kind_of(job)
        found = cluster.read(row, run_name(job))
        if found is None or not is_ours(found):
            return None
        metadata = found["metadata"]
        submission = _submission(
            cluster, row, metadata["name"], metadata["uid"], metadata["creationTimestamp"]
        )
        with suppress(InputError, OSError):
            record(self.prepare(job), submission)
        return self.record_folder(job), submission

    def status(self, folder: Path, submission: Submission) -> list[tuple[str, str]]:
        """Returns rows with state, pods and important events.

        If the run folder is not on this machine, the run's step is read from the launcher's log.
        """
        from trainer.launch.kubernetes.state import rows

        cluster, row, name = _place(submission)
        found = cluster.read(row, name)
        if replaced := _replaced(row, found, submission):
            return [("state", f"gone: {replaced}")]
        return rows(cluster, row, name, found, visible=(folder / JOB_FILE).exists())

    def outcome(self, folder: Path, submission: Submission) -> Outcome:
        """Returns how far the run got; an object that was deleted has ended."""
        cluster, row, name = _place(submission)
        found = cluster.read(row, name)
        if found is None or _replaced(row, found, submission):
            return "ended"
        if not row.ended_at(found):
            return "running"
        return "done" if row.succeeded in row.conditions(found) else "ended"

    def cancel(self, folder: Path, submission: Submission) -> str:
        """Delete the job's object and return a sentence about it.

        Kubernetes asks its pods to stop, and they save first.
        """
        from trainer.launch.kubernetes.objects import adopt_what_kubectl_made
        from trainer.launch.kubernetes.state import pods_of

        cluster, row, name = _place(submission)
        found = cluster.read(row, name)
        if found is None:
            return f"{row.kind} {submission.id} does not exist any more"
        if replaced := _replaced(row, found, submission):
            return f"{replaced}; nothing is deleted"
        graces = [pod["spec"].get("terminationGracePeriodSeconds", 30) for pod in pods_of(cluster, row, name)]
        adopt_what_kubectl_made(cluster, row, found)
        cluster.delete(row, name, "Background", f"delete the {row.kind} {name}")
        if row.ended_at(found):
            return f"{row.kind} {submission.id} had ended; it is deleted, together with its pods' logs"
        return (
            f"{row.kind} {submission.id} is deleted; its ranks save and exit within "
            f"{max(graces, default=0)} s (kubernetes.grace_s)"
        )

    def ends(self, submission: Submission) -> str:
        """Returns the kubectl that deletes the job's object."""
        known = submission.details
        context = [] if known["context"].startswith("the pod") else [f"--context={known['context']}"]
        return command(
            "kubectl", *context, f"--namespace={known['namespace']}", "delete", known["kind"], known["name"]
        )

    def log_lines(
        self, folder: Path, submission: Submission, rank: int | None, follow: bool
    ) -> Iterator[str] | None:
        """Returns the log of the pods that have the run's output, or one rank's file from a pod.

        Returns None if the rank's file is in the run folder on this machine.
        """
        from trainer.launch.kubernetes.pod_logs import output_lines, rank_lines

        if rank is not None and (folder / LOGS).is_dir():
            return None
        cluster, row, name = _place(submission)
        if replaced := _replaced(row, cluster.read(row, name), submission):
            raise InputError(f"{replaced}; the logs of this run's pods were deleted with them")
        if rank is None:
            return output_lines(cluster, row, name, follow)
        return rank_lines(cluster, row, name, rank, follow)


def _submission(cluster: "Cluster", row: type[Kind], name: str, uid: str, at: str) -> Submission:
    details = {
        "context": cluster.context,
        "namespace": cluster.namespace,
        "kind": row.name_in_job,
        "name": name,
        "uid": uid,
    }
    return Submission("kubernetes", f"{cluster.namespace}/{name}", at, details)


def _replaced(row: type[Kind], found: Object | None, submission: Submission) -> str:
    """Returns a sentence if the object of this name belongs to another run, else ""."""
    if found is None or found["metadata"]["uid"] == submission.details["uid"]:
        return ""
    return (
        f"the {row.kind} of this run was deleted; {submission.id} is now another {row.kind} of the same "
        "name, submitted later"
    )


def _place(submission: Submission) -> tuple["Cluster", type[Kind], str]:
    """Returns the cluster of a submitted run, and its object's kind and name. Raises InputError."""
    from trainer.launch.kubernetes.cluster import connect

    known = submission.details
    if known.get("kind") not in KINDS:
        raise InputError(
            f"{submission.id} is a {known.get('kind')}, which is none of {', '.join(KINDS)}: submit it again"
        )
    context = None if known["context"].startswith("the pod") else known["context"]
    return connect(known["namespace"], context), KINDS[known["kind"]], known["name"]


def _nearest(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())
