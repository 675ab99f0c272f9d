"""Slurm for `clipship submit`, `status`, `logs` and `cancel`: sbatch, squeue, sacct, scancel.

Imports no torch.
"""

import datetime
import getpass
import math
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from trainer.config import Job
from trainer.config.loader import dump_job
from trainer.config.slurm_values import output_file
from trainer.errors import ClusterError, InputError, NoAnswer
from trainer.launch import logfiles
from trainer.launch.commands import answer_of
from trainer.launch.slurm.script import batch_script
from trainer.launch.submission import Outcome, Submission, read_record
from trainer.run.layout import ARTEFACTS, EXIT_BEFORE_FILE, EXIT_FILE, JOB_FILE, LOGS, SUBMISSION_FILE
from trainer.safe_io.atomic import write_whole
from trainer.text.paste import word

SCRIPT = "train.sbatch"
_ANSWER_LIMIT_S = 60
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

_GPU_KEYS = "slurm.gres, slurm.gpus, slurm.gpu_type, resources.gpus_per_node"
_KEYS_OF_MESSAGES = {
    "invalid account": "slurm.account, slurm.partition",
    "accounting/qos policy": "slurm.qos, slurm.time, [resources]: a limit of the account or of the QOS",
    "partition": "slurm.partition (`sinfo` lists the partitions)",
    "account": "slurm.account, slurm.partition",
    "qos": "slurm.qos",
    "time limit": "slurm.time",
    "feature": "slurm.constraint",
    "reservation": "slurm.reservation",
    "node name": "slurm.nodelist, slurm.exclude",
    "dependency": "slurm.dependency",
    "gres": _GPU_KEYS,
    "generic resource": _GPU_KEYS,
    "memory specification": "slurm.mem, resources.mem_gb_per_gpu",
    "node configuration": (
        "resources.nodes, gpus_per_node, cpus_per_gpu, mem_gb_per_gpu (`sinfo -Nl` shows what nodes have)"
    ),
    "node count": "resources.nodes",
    "processors": "resources.cpus_per_gpu, resources.gpus_per_node",
    "unrecognized option": "slurm.extra",
    "mail": "slurm.mail_type, slurm.mail_user",
    "array": "slurm.array, or the grid of a sweep (`scontrol show config` has MaxArraySize)",
}
"""Keys of the job file to change, by a text that Slurm's message contains."""


def submit(job: Job, folder: Path) -> Submission:
    """Write the script and the job into the run folder, and submit the script by sbatch.

    sbatch runs in the folder `logs`, where slurm-JOB.out is then written.
    """
    _refuse_second_job(folder)
    write_run(job, folder)
    with earlier_end_aside(folder):
        job_id, cluster = sbatch(folder / ARTEFACTS / SCRIPT, folder / LOGS)
    return submission_of(job, job_id, cluster)


def write_run(job: Job, folder: Path, *, in_array: bool = False) -> None:
    """Write the run's script and its job into the run folder, and make the folders of what it prints."""
    text = batch_script(job, in_array=in_array)
    (folder / LOGS).mkdir(exist_ok=True)
    write_whole(folder / ARTEFACTS / JOB_FILE, dump_job(job), private=True)
    write_whole(folder / ARTEFACTS / SCRIPT, text, private=True)
    if job.slurm.output:
        Path(job.slurm.output).parent.mkdir(parents=True, exist_ok=True)


def sbatch(script: Path, folder: Path) -> tuple[str, str]:
    """Submit the script from the folder; returns the job's number, and the cluster's name or "".

    Raises InputError with the keys to change, or ClusterError.
    """
    answer = _call(
        "sbatch",
        "--parsable",
        str(script.absolute()),
        cwd=folder,
        environment=_submit_environment(os.environ),
    )
    if answer.returncode:
        _raise_refusal(answer.stderr)
    return _job_id(answer.stdout)


def submission_of(job: Job, job_id: str, cluster: str) -> Submission:
    """Returns the record of a job, or of one task of an array, that was submitted now."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    details = {"cluster": cluster} if cluster else {}
    if job.slurm.output and not ("_" in job_id and "%j" in job.slurm.output):  # %j of a task is not known yet
        details["output"] = output_file(job.slurm.output, job_id, job.name, getpass.getuser())
    return Submission("slurm", job_id, now, details)


@contextmanager
def earlier_end_aside(folder: Path) -> Iterator[None]:
    """Move the record of an earlier end aside; it is restored if nothing is submitted.

    Otherwise `status` would show that end until the script begins.
    """
    record, aside = folder / EXIT_FILE, folder / ARTEFACTS / EXIT_BEFORE_FILE
    with suppress(FileNotFoundError):
        record.replace(aside)
    try:
        yield
    except BaseException:
        with suppress(FileNotFoundError):
            aside.replace(record)
        raise
    aside.unlink(missing_ok=True)


def _submit_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for sbatch, whose environment the job inherits.

    Those of a Slurm session in which this command may run are left out.
    """
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith("SLURM_") or name in ("SLURM_CONF", "SLURM_CLUSTERS")
    }


def _job_id(output: str) -> tuple[str, str]:
    """Returns the job's number and the cluster's name or "".

    A site's sbatch may print other lines before them.
    """
    matches = [
        match for line in output.splitlines() if (match := re.fullmatch(r"(\d+)(?:;(\S+))?", line.strip()))
    ]
    if not matches:
        raise ClusterError(
            "sbatch printed no job number, so it is not known whether the job is queued (`squeue --me` "
            f"shows it); sbatch printed: {output.strip()}"
        )
    return matches[-1][1], matches[-1][2] or ""


def adopt(job: Job, folder: Path | None) -> tuple[Path, Submission] | None:
    """Returns None: a batch script writes the record itself when it begins."""


def status(folder: Path, submission: Submission) -> list[tuple[str, str]]:
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


def outcome(folder: Path, submission: Submission) -> Outcome:
    """Returns how far the job got; a chain of jobs runs while one of them does."""
    states = [row["state"] for row in _queue(submission) or _accounting(submission)]
    if any(not state.startswith(_ENDED_STATES) for state in states):
        return "running"
    return "done" if states and states[-1].startswith("COMPLETED") else "ended"


def cancel(folder: Path, submission: Submission) -> str:
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
    rows = _queue(submission)
    if all(row["state"] in _ENDED_STATES for row in rows):
        raise ClusterError(
            f"job {submission.id} has already ended" + (f" ({rows[-1]['state']})" if rows else "")
        )
    answer = _call("scancel", *_cluster_options(submission), submission.id)
    if answer.returncode:
        raise ClusterError(f"scancel {submission.id}: {answer.stderr.strip()}")
    return f"job {submission.id} is cancelled; its ranks save first, within the cluster's KillWait"


def log_lines(folder: Path, submission: Submission, rank: int | None, follow: bool) -> Iterator[str] | None:
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
        shown = _call("scontrol", "show", "job", *_cluster_options(submission), submission.id).stdout
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
    answer = _call(
        "squeue",
        "--noheader",
        "--states=all",
        f"--jobs={submission.id}",
        f"--format={_FORMAT}",
        *_cluster_options(submission),
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
        answer = _call(
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            f"--jobs={submission.id}",
            f"--format={fields}",
            *_cluster_options(submission),
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


def _cluster_options(submission: Submission) -> list[str]:
    return [f"--clusters={submission.details['cluster']}"] if "cluster" in submission.details else []


def _call(
    *command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm, in English unless its environment is given.

    Raises ClusterError if it is missing or does not answer.
    """
    environment = environment or {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        return answer_of(*command, cwd=cwd, env=environment, timeout=_ANSWER_LIMIT_S)
    except FileNotFoundError:
        raise ClusterError(
            f"{command[0]} is not on PATH: run this on a machine with Slurm's commands, such as a login "
            f"node; or render the script (`clipship render slurm JOB > {SCRIPT}`) and submit it there "
            f"(`sbatch {SCRIPT}`)"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{command[0]} did not answer within {_ANSWER_LIMIT_S} s: is Slurm's controller running? "
            "(`scontrol ping` says so)"
        ) from None


def _raise_refusal(message: str) -> NoReturn:
    """Raises InputError with Slurm's message and the keys to change.

    Raises ClusterError if the keys are not known.
    """
    text = message.strip() or "no reason given"
    keys = _keys(text.lower().splitlines())
    if keys is None:
        raise ClusterError(f"sbatch: {text}")
    raise InputError(f"Slurm refuses the job: {text}\nchange {keys}")


def _keys(lines: Sequence[str]) -> str | None:
    matches = (keys for line in reversed(lines) for text, keys in _KEYS_OF_MESSAGES.items() if text in line)
    return next(matches, None)
