"""Runs of a sweep as arrays of Slurm: one sbatch for runs that ask for the same. Imports no torch."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from trainer.config import Job
from trainer.errors import InputError
from trainer.launch.slurm.scheduler import SCRIPT, earlier_end_aside, sbatch, submission_of, submit, write_run
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


def submit_together(
    runs: Sequence[Run], folder: Path, parallel: int | None
) -> Iterator[tuple[Path, Submission]]:
    """Submits the runs, and yields each with its run folder as soon as Slurm has it.

    Runs that ask Slurm for the same make one array; one that is a chain of jobs itself (`slurm.array`) is a
    job of its own. `folder` is the sweep's; at most `parallel` runs of an array run at a time.
    """
    for number, group in enumerate(_groups(runs), 1):
        if len(group) == 1:
            job, own = group[0]
            yield own, submit(job, own)
        else:
            script = folder / _FOLDER / f"{folder.name}-{number}.sbatch"
            ids = _submit_array(group, script, parallel)
            yield from zip((own for _, own in group), ids, strict=True)


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


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[object, list[Run]] = {}
    for job, own in runs:
        groups.setdefault(own if job.slurm.array else _request(job), []).append((job, own))
    return list(groups.values())


def _request(job: Job) -> tuple[tuple[str, str | None], ...]:
    """Returns what the run's script asks of sbatch, but for its name."""
    return tuple((option, value) for option, value in directives(job) if option not in _OWN)


def _submit_array(runs: Sequence[Run], script: Path, parallel: int | None) -> list[Submission]:
    text = array_script(runs, script.stem, parallel)
    script.parent.mkdir(parents=True, exist_ok=True)
    write_whole(script, text)
    with ExitStack() as stack:
        for job, own in runs:
            write_run(job, own, in_array=True)
            stack.enter_context(earlier_end_aside(own))
        array, cluster = sbatch(script, script.parent)
    return [submission_of(job, f"{array}_{task}", cluster) for task, (job, _) in enumerate(runs)]
