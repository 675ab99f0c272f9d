"""Slurm for `clipship render`, `check`, `submit`, `status`, `logs` and `cancel`.

Asks squeue and sacct, and cancels by scancel. Imports no torch.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.comm.backends import Launcher
from trainer.config import Job
from trainer.errors import ClusterError, InputError
from trainer.launch.slurm import validate
from trainer.launch.slurm.image_file import with_image_file
from trainer.launch.slurm.script import batch_script
from trainer.launch.slurm.submit import (
    ENDED_STATES,
    SCRIPT,
    Run,
    accounted,
    call,
    cluster_options,
    earlier_end_aside,
    groups,
    queued,
    sbatch,
    submission_of,
    submit_array,
    write_run,
)
from trainer.launch.submission import Outcome, Scheduler, Submission, read_record
from trainer.run.layout import ARTEFACTS, LOGS, SUBMISSION_FILE
from trainer.text.paste import command, word
from trainer.text.terminal import say


class SlurmScheduler(Scheduler):
    """Jobs of sbatch."""

    def render(self, job: Job) -> str:
        return batch_script(job)

    def validate(self, job: Job) -> None:
        batch_script(job)  # rendering also finds problems with mounts

    def starter(self, job: Job) -> str:
        return job.slurm.launcher

    def launcher(self, job: Job) -> Launcher:
        return validate.launcher(job)

    def settled(self, job: Job) -> tuple[Job, str]:
        return with_image_file(job)

    def warnings(self, job: Job) -> Iterator[str]:
        return validate.warnings(job)

    def submit(self, job: Job, folder: Path) -> Submission:
        """Write the script and the job into the run folder, and submit the script by sbatch.

        sbatch runs in the folder `logs`, where slurm-JOB.out is then written.
        """
        _refuse_second_job(folder)
        write_run(job, folder)
        with earlier_end_aside(folder):
            job_id, cluster = sbatch(folder / ARTEFACTS / SCRIPT, folder / LOGS)
        return submission_of(job, job_id, cluster)

    def submit_together(
        self, runs: Sequence[Run], folder: Path, parallel: int | None
    ) -> Iterator[tuple[Path, Submission]]:
        """Submit the runs, and yield each with its run folder as soon as Slurm has it.

        Runs that ask Slurm for the same make one array; one that is a chain of jobs itself (`slurm.array`) is
        a job of its own. `parallel` holds within an array; if there are several, says how many runs may run.
        """
        found = groups(runs)
        if parallel and (at_a_time := sum(min(parallel, len(group)) for group in found)) > parallel:
            say(
                f"warning: --parallel {parallel} holds for each array of Slurm, and these runs make "
                f"{len(found)}, as they do not all ask for the same: up to {at_a_time} run at a time"
            )
        for number, group in enumerate(found, 1):
            if len(group) == 1:
                yield from super().submit_together(group, folder, parallel)
            else:
                yield from submit_array(group, folder, number, parallel)

    def adopt(self, job: Job, folder: Path | None) -> tuple[Path, Submission] | None:
        """Returns None: a batch script writes the record itself when it begins."""

    def status(self, folder: Path, submission: Submission) -> list[tuple[str, str]]:
        """Returns rows from squeue while it knows the job, then from sacct if accounting is on."""
        head = ("job", f"{submission.id} on Slurm since {submission.at}")
        jobs = queued(submission) or accounted(submission)
        if not jobs:
            return [("state", "unknown: Slurm no longer knows the job, and accounting is off"), head]
        states = Counter(job["state"] for job in jobs)
        shown = next((job for job in jobs if job["state"] == "RUNNING"), jobs[-1])
        rows = [
            (
                "state",
                ", ".join(state if count == 1 else f"{count} x {state}" for state, count in states.items()),
            ),
            head,
        ]
        if shown.get("reason", "None") not in ("None", ""):
            rows.append(("reason", shown["reason"]))
        nodes = f"{shown['nodes']} node{'s' * (shown['nodes'] != '1')}"
        where = f" on {shown['where']}" if shown.get("where") else ""
        return [*rows, ("time", f"{shown['used']} of {shown['limit']}, {nodes}{where}")]

    def outcome(self, folder: Path, submission: Submission) -> Outcome:
        """Returns how far the job got; a chain of jobs runs while one of them does."""
        states = [row["state"] for row in queued(submission) or accounted(submission)]
        if any(not state.startswith(ENDED_STATES) for state in states):
            return "running"
        return "done" if states and states[-1].startswith("COMPLETED") else "ended"

    def cancel(self, folder: Path, submission: Submission) -> str:
        """Cancel the job by scancel.

        Slurm sends SIGTERM to all ranks, which save, and kills the remaining processes after its KillWait.
        Raises InputError for a record that another user wrote: it may name any job of this user's.
        """
        path = folder / ARTEFACTS / SUBMISSION_FILE
        if os.geteuid() not in (0, path.stat().st_uid):
            raise InputError(
                f"{path} was written by another user, so it does not say which of your jobs to end: if "
                f"{submission.id} is the one, `scancel {submission.id}` ends it"
            )
        rows = queued(submission)
        if all(row["state"] in ENDED_STATES for row in rows):
            raise ClusterError(
                f"job {submission.id} has already ended" + (f" ({rows[-1]['state']})" if rows else "")
            )
        answer = call(*_scancel(submission))
        if answer.returncode:
            raise ClusterError(f"scancel {submission.id}: {answer.stderr.strip()}")
        return f"job {submission.id} is cancelled; its ranks save first, within the cluster's KillWait"

    def ends(self, submission: Submission) -> str:
        """Returns the scancel that ends the job."""
        return command(*_scancel(submission))

    def log_lines(
        self, folder: Path, submission: Submission, rank: int | None, follow: bool
    ) -> Iterator[str] | None:
        """Returns the lines to show; None if the ranks' own log files have everything.

        Before there are log files, the batch script's output tells the reason.
        """
        from trainer.launch.slurm.output import log_lines  # it imports what the report knows

        return log_lines(folder, submission, rank, follow)


def _scancel(submission: Submission) -> list[str]:
    return ["scancel", *cluster_options(submission), submission.id]


def _refuse_second_job(folder: Path) -> None:
    """Raises InputError if the run folder belongs to a job that has not ended: two jobs would spoil it."""
    earlier = read_record(folder)
    if earlier is None or earlier.to != "slurm":
        return
    alive = [row["state"] for row in queued(earlier) if row["state"] not in ENDED_STATES]
    if alive:
        raise InputError(
            f"the run in {folder} is already Slurm job {earlier.id} ({alive[0]}): end that job with "
            f"`clipship cancel {word(folder)}`, or give this run another name with --set name=..."
        )
