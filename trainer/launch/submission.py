"""What was submitted for a run, and the schedulers that know how it is. Imports no torch and no scheduler before one is asked."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

from trainer.errors import ClusterError, InputError
from trainer.inputs.run_folder import ARTEFACTS as ARTEFACTS
from trainer.inputs.run_folder import JOB_FILE
from trainer.whole_file import write_json

if TYPE_CHECKING:
    from trainer.job import Job

SchedulerName = Literal["slurm", "kubernetes"]
SCHEDULERS: tuple[str, ...] = get_args(SchedulerName)

RECORD = "submission.json"
_CLIENTS = {"kubernetes": "kubernetes"}


@dataclass(frozen=True)
class Submission:
    """What `clipship submit`, or a batch script when it begins, leaves in the run folder for status, logs and cancel."""

    to: SchedulerName
    id: str
    """The scheduler's own name for it."""
    at: str
    """When, in UTC (ISO 8601)."""
    details: Mapping[str, str] = field(default_factory=dict)
    """What this scheduler needs besides."""


class Scheduler(Protocol):
    """The module `trainer.launch.NAME.scheduler` of each scheduler. All raise ClusterError where it does not answer or refuses."""

    def submit(self, job: "Job", folder: Path) -> Submission:
        """Write what is submitted into the folder's artefacts, and submit it. The folder exists."""

    def adopt(self, job: "Job", folder: Path | None) -> tuple[Path, Submission] | None:
        """What was submitted for the job by hand, recorded now, and where; `folder` is that of the run where there is one here."""

    def status(self, folder: Path, submission: Submission) -> list[tuple[str, str]]:
        """Topic and text, a line each; the first is `state`."""

    def cancel(self, folder: Path, submission: Submission) -> str:
        """End it; returns a sentence on what happened."""

    def log_lines(self, folder: Path, submission: Submission, rank: int | None, follow: bool) -> Iterator[str] | None:
        """What the ranks said, in the order of time; None: it is in the run folder's log files."""


def scheduler(name: str) -> Scheduler:
    """The module that speaks with it. Raises InputError where the client that it needs is not installed."""
    needs = _CLIENTS.get(name)
    if needs is not None and importlib.util.find_spec(needs) is None:
        raise InputError(f"{name} needs the Python package {needs}, which {sys.executable} does not have: pip install 'clipship[launch]'")
    return cast(Scheduler, importlib.import_module(f"trainer.launch.{name}.scheduler"))


def record(folder: Path, submission: Submission) -> None:
    """Into the run folder, whole or not at all."""
    write_json(folder / ARTEFACTS / RECORD, asdict(submission))


def read_record(folder: Path) -> Submission | None:
    """None for a run that was not submitted. Raises InputError where the record cannot be read."""
    path = folder / ARTEFACTS / RECORD
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        submission = Submission(**found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as problem:
        raise InputError(f"{path} cannot be read ({problem}): it says where the run was submitted; submit it again") from None
    if submission.to not in SCHEDULERS:
        raise InputError(f"{path}: unknown scheduler {submission.to!r}; known are {', '.join(SCHEDULERS)}")
    return submission


def find_run(name: str) -> Path:
    """The run folder that the user means: itself, a job file's, or a name in the folder `runs`. Raises InputError where there is none."""
    path = Path(name)
    if _is_run(path):
        return path
    if path.is_file():
        from trainer import jobfile
        from trainer.inputs.run_folder import run_folder

        job = jobfile.load(path)
        for path in (run_folder(job), Path("runs", job.name)):  # the second keeps what was submitted where ranks see other files
            if _is_run(path):
                return path
        raise InputError(
            f"{name} has no run folder here: neither {run_folder(job)} nor runs/{job.name} below this folder. "
            "It has not begun, or was submitted from another folder"
        )
    if "/" not in name and _is_run(Path("runs", name)):
        return Path("runs", name)
    raise InputError(f"{name} is no run: give a run folder, a job file, or the name of a run in ./runs")


def find_submission(name: str) -> tuple[Path, Submission | None]:
    """See `find_run`; and what was submitted for it, by hand too, where a scheduler of the job file knows that."""
    try:
        folder = find_run(name)
    except InputError as missing:
        try:
            found = _adopted(Path(name), None)
        except (ClusterError, InputError) as problem:
            raise InputError(f"{missing}; and its cluster cannot be asked: {problem}") from None
        if found is None:
            raise
        return found
    submission = read_record(folder)
    if submission is None:
        with suppress(ClusterError, InputError):  # the folder says enough
            return _adopted(Path(name), folder) or (folder, None)
    return folder, submission


def _adopted(path: Path, folder: Path | None) -> tuple[Path, Submission] | None:
    """Of a job file."""
    if not path.is_file():
        return None
    from trainer import jobfile

    job = jobfile.load(path)
    found = (scheduler(name).adopt(job, folder) for name in SCHEDULERS if name in job.model_fields_set)
    return next((one for one in found if one is not None), None)


def _is_run(folder: Path) -> bool:
    """Whether something was submitted or started in it."""
    return any((folder / name).exists() for name in (JOB_FILE, "exit.json", "logs", f"{ARTEFACTS}/{RECORD}"))
