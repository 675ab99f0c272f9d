"""Answers of Slurm about jobs: squeue while it knows them, then sacct. Imports no torch."""

from trainer.errors import ClusterError
from trainer.launch.slurm.sbatch import call, cluster_options
from trainer.launch.submission import Submission

ENDED_STATES = (
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


def queued(submission: Submission) -> list[dict[str, str]]:
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
    return _rows(answer.stdout, "reason")


def accounted(submission: Submission) -> list[dict[str, str]]:
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
    rows = [] if answer.returncode else _rows(answer.stdout, "exit")
    return [{**row, "state": f"{row['state']}, exit code {row['exit']}"} for row in rows]


def _rows(output: str, fifth: str) -> list[dict[str, str]]:
    names = ("state", "used", "limit", "nodes", fifth, "where")
    return [
        dict(zip(names, line.split("|"), strict=False))
        for line in output.splitlines()
        if line.count("|") >= len(names) - 1
    ]
