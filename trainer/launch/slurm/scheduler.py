"""Slurm for `clipship render`, `check`, `submit`, `status`, `logs` and `cancel`.

Asks squeue and sacct, and cancels by scancel. Imports no torch.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.comm.backends import Launcher
from trainer.config import Job
from trainer.errors import ClusterError, InputError
from trainer.launch import logfiles
from trainer.launch.slurm import validate
from trainer.launch.slurm.array import Run, groups, submit_array
from trainer.launch.slurm.sbatch import (
    SCRIPT,
    call,
    cluster_options,
    earlier_end_aside,
    sbatch,
    submission_of,
    write_run,
)
from trainer.launch.slurm.script import batch_script
from trainer.launch.submission import Outcome, Scheduler, Submission, read_record
from trainer.run.layout import ARTEFACTS, LOGS, SUBMISSION_FILE
from trainer.text.paste import word

_POLL_S = 5.0
"""Seconds between two questions whether a job still runs; fewer questions spare Slurm's controller."""
_SILENCE_LIMIT_S = 600.0
"""Seconds of silence after which a controller that has answered before counts as gone: it may be busy or
restarting."""
_ENDED_STATES = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
    "REVOKED",
)
_FORMAT = "%T|%M|%l|%D|%r|%N"  # state, time used, time limit, nodes, why it waits, where it runs


class SlurmScheduler(Scheduler):
    """Jobs of sbatch."""

    def render(self, job: Job) -> str:
        return batch_script(job)

    def validate(self, job: Job) -> None:
        batch_script(job)  # rendering also finds problems with mounts

    def starter(self, job: Job) -> str:
        return validate.starter(job)

    def launcher(self, job: Job) -> Launcher:
        return validate.launcher(job)

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
        a job of its own.
        """
        for number, group in enumerate(groups(runs), 1):
            if len(group) == 1:
                yield from super().submit_together(group, folder, parallel)
            else:
                yield from submit_array(group, folder, number, parallel)

    def adopt(self, job: Job, folder: Path | None) -> tuple[Path, Submission] | None:
        """Returns None: a batch script writes the record itself when it begins."""

    def status(self, folder: Path, submission: Submission) -> list[tuple[str, str]]:
        """Returns rows from squeue while it knows the job, then from sacct if accounting is on."""
        head = ("job", f"{submission.id} on Slurm since {submission.at}")
        jobs = _queue(submission) or _accounting(submission)
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
        states = [row["state"] for row in _queue(submission) or _accounting(submission)]
        if any(not state.startswith(_ENDED_STATES) for state in states):
            return "running"
        return "done" if states and states[-1].startswith("COMPLETED") else "ended"

    def cancel(self, folder: Path, submission: Submission) -> str:
        """Cancel the job by scancel.

        Slurm sends SIGTERM to all ranks, which save, and kills the remaining processes after its KillWait.
        """
        rows = _queue(submission)
        if all(row["state"] in _ENDED_STATES for row in rows):
            raise ClusterError(
                f"job {submission.id} has already ended" + (f" ({rows[-1]['state']})" if rows else "")
            )
        answer = call("scancel", *cluster_options(submission), submission.id)
        if answer.returncode:
            raise ClusterError(f"scancel {submission.id}: {answer.stderr.strip()}")
        return f"job {submission.id} is cancelled; its ranks save first, within the cluster's KillWait"

    def log_lines(
        self, folder: Path, submission: Submission, rank: int | None, follow: bool
    ) -> Iterator[str] | None:
        """Returns the lines to show; None if the ranks' own log files have everything.

        Before there are log files, the batch script's output tells the reason.
        """
        if follow:
            return _followed(folder, submission, rank)
        return None if rank is not None or logfiles.has_logs(folder) else _script_output(folder, submission)


def _followed(folder: Path, submission: Submission, rank: int | None) -> Iterator[str]:
    """Yields the ranks' lines until Slurm has ended the job; the script's output if no rank wrote any."""
    last_question, last_answer, over = -math.inf, -math.inf, False

    def is_over() -> bool:
        nonlocal last_question, last_answer, over
        now = time.monotonic()
        if not over and now - last_question > _POLL_S:
            last_question = now
            try:
                over, last_answer = all(row["state"] in _ENDED_STATES for row in _queue(submission)), now
            except ClusterError:
                if now - last_answer > _SILENCE_LIMIT_S:
                    raise
        return over

    yield from logfiles.log_lines(folder, rank, follow=True, over=is_over)
    if not logfiles.has_logs(folder):
        yield from _script_output(folder, submission) or ()


def _script_output(folder: Path, submission: Submission) -> Iterator[str] | None:
    output = Path(submission.details.get("output") or folder / LOGS / f"slurm-{submission.id}.out")
    if not output.exists():  # the job was submitted by hand, from elsewhere
        shown = call("scontrol", "show", "job", *cluster_options(submission), submission.id).stdout
        output = Path(next(iter(re.findall(r"^ *StdOut=(.+)$", shown, re.MULTILINE)), output))
    if not output.exists():
        return None
    if _owner(output) != _owner(folder / ARTEFACTS / SUBMISSION_FILE):
        raise InputError(f"{output} is not shown: it belongs to another user than the run in {folder}")
    return (f"[slurm] {line}" for line in logfiles.plain_lines(output))


def _owner(path: Path) -> int:
    return path.stat().st_uid


def _refuse_second_job(folder: Path) -> None:
    """Raises InputError if the run folder belongs to a job that has not ended: two jobs would spoil it."""
    earlier = read_record(folder)
    if earlier is None or earlier.to != "slurm":
        return
    alive = [row["state"] for row in _queue(earlier) if row["state"] not in _ENDED_STATES]
    if alive:
        raise InputError(
            f"the run in {folder} is already Slurm job {earlier.id} ({alive[0]}): end that job with "
            f"`clipship cancel {word(folder)}`, or give this run another name with --set name=..."
        )


def _queue(submission: Submission) -> list[dict[str, str]]:
    """Returns one row for each job of an array, else one; none if squeue no longer knows the job."""
    answer = call(
        "squeue",
        "--noheader",
        "--states=all",
        f"--jobs={submission.id}",
        f"--format={_FORMAT}",
        *cluster_options(submission),
    )
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise ClusterError(f"squeue: {answer.stderr.strip()}")
    names = ("state", "used", "limit", "nodes", "reason", "where")
    return [
        dict(zip(names, line.split("|"), strict=False))
        for line in answer.stdout.splitlines()
        if line.count("|") >= len(names) - 1
    ]


def _accounting(submission: Submission) -> list[dict[str, str]]:
    """Returns the rows that sacct has about the job; none if accounting is off."""
    fields = "State,Elapsed,Timelimit,NNodes,ExitCode,NodeList"
    try:
        answer = call(
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            f"--jobs={submission.id}",
            f"--format={fields}",
            *cluster_options(submission),
        )
    except ClusterError:
        return []
    names = ("state", "used", "limit", "nodes", "exit", "where")
    rows = [
        dict(zip(names, line.split("|"), strict=False))
        for line in answer.stdout.splitlines()
        if line.count("|") == len(names) - 1
    ]
    return (
        [{**row, "state": f"{row['state']}, exit code {row['exit']}"} for row in rows]
        if not answer.returncode
        else []
    )
