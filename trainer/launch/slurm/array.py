"""Runs of a sweep as arrays of Slurm: one sbatch for runs that ask for the same. Imports no torch."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from trainer.config import Job
from trainer.errors import InputError
from trainer.launch.slurm.sbatch import SCRIPT, earlier_end_aside, sbatch, submission_of, write_run
from trainer.launch.slurm.script import directives
from trainer.launch.submission import Submission
from trainer.launch.templates import render
from trainer.run.layout import ARTEFACTS, LOGS
from trainer.safe_io.atomic import write_whole

Run = tuple[Job, Path]
"""A job and its run folder."""
_FOLDER = "slurm"
"""Folder of a sweep with the scripts of its arrays, and with what Slurm itself prints about them."""
_OWN = ("job-name", "array")
"""Options of sbatch that are not those of the run's own script."""


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
