"""Submits batch scripts, and runs of a sweep as arrays, by sbatch; asks Slurm about jobs. No torch."""

import datetime
import getpass
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from trainer.config import Job
from trainer.config.loader import dump_job
from trainer.config.slurm import output_file
from trainer.errors import ClusterError, InputError, NoAnswer
from trainer.launch.commands import answer_of
from trainer.launch.slurm.script import batch_script, directives
from trainer.launch.submission import Submission
from trainer.launch.templates import render
from trainer.run.layout import ARTEFACTS, EXIT_BEFORE_FILE, EXIT_FILE, JOB_FILE, LOGS
from trainer.safe_io.atomic import write_whole
from trainer.sysinfo.own_table import own_table

SCRIPT = "train.sbatch"
_ANSWER_LIMIT_S = 60
_FOLDER = "slurm"
"""Folder of a sweep with the scripts of its arrays, and with what Slurm itself prints about them."""
_OWN = ("job-name", "array")
"""Options of sbatch that are not those of the run's own script."""
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
Run = tuple[Job, Path]
"""A job and its run folder."""


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
    answer = call(
        "sbatch",
        "--parsable",
        str(script.absolute()),
        cwd=folder,
        environment=_submit_environment(os.environ),
    )
    if answer.returncode:
        _raise_refusal(answer.stderr)
    return _job_id(answer.stdout)


def submission_of(job: Job, job_id: str, cluster: str, name: str | None = None) -> Submission:
    """Returns the record of a job, or of one task of an array of that name, that was submitted now."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    details = {"cluster": cluster} if cluster else {}
    if job.slurm.output and not ("_" in job_id and "%j" in job.slurm.output):  # %j of a task is not known yet
        details["output"] = output_file(job.slurm.output, job_id, name or job.name, getpass.getuser())
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
    with suppress(OSError):  # the job is submitted, and the next end takes this one's place
        aside.unlink()


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


def cluster_options(submission: Submission) -> list[str]:
    """Returns the options by which Slurm's commands ask the cluster of the submission."""
    return [f"--clusters={submission.details['cluster']}"] if "cluster" in submission.details else []


def call(
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
    known = own_table(__file__, "refusals.toml")
    matches = (keys for line in reversed(lines) for text, keys in known.items() if text in line)
    return next(matches, None)


def array_script(runs: Sequence[Run], name: str, parallel: int | None) -> str:
    """Returns the script whose tasks become the runs' own scripts. Pure.

    Raises InputError if all tasks would write one file.
    """
    first = runs[0][0]
    if (output := first.slurm.output) and not any(part in output for part in ("%j", "%a")):
        raise InputError(f"slurm.output = {output}: all runs of the sweep would write it; add %a or %j")
    limit = f"%{parallel}" if parallel else ""
    return render(
        "slurm/array.sbatch.j2",
        sweep=name,
        runs=[str(own) for _, own in runs],
        directives=[("job-name", name), ("array", f"0-{len(runs) - 1}{limit}"), *_request(first)],
        output=output,
        logs=LOGS,
        script=f"{ARTEFACTS}/{SCRIPT}",
    )


def groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the runs that ask Slurm for the same together; a chain of jobs is alone."""
    groups: dict[object, list[Run]] = {}
    for job, own in runs:
        groups.setdefault(own if job.slurm.array else _request(job), []).append((job, own))
    return list(groups.values())


def _request(job: Job) -> tuple[tuple[str, str | None], ...]:
    """Returns what the run's script asks of sbatch, but for its name."""
    return tuple((option, value) for option, value in directives(job) if option not in _OWN)


def submit_array(
    runs: Sequence[Run], folder: Path, number: int, parallel: int | None
) -> Iterator[tuple[Path, Submission]]:
    """Submits runs that ask Slurm for the same as one array; yields each folder with its submission.

    `folder` is the sweep's, and `number` is that of its array; at most `parallel` tasks run at a time.
    """
    script = folder / _FOLDER / f"{folder.name}-{number}.sbatch"
    text = array_script(runs, script.stem, parallel)
    script.parent.mkdir(parents=True, exist_ok=True)
    write_whole(script, text)
    with ExitStack() as stack:
        for job, own in runs:
            write_run(job, own, in_array=True)
            stack.enter_context(earlier_end_aside(own))
        array, cluster = sbatch(script, script.parent)
    for task, (job, own) in enumerate(runs):
        yield own, submission_of(job, f"{array}_{task}", cluster, script.stem)


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
