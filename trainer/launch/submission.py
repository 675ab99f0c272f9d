"""Records of submitted runs, and what a scheduler must do. Imports no torch, and no scheduler."""

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from trainer.config.schedulers import SCHEDULERS
from trainer.errors import ClusterError, InputError, NoAnswer
from trainer.run.find import HERE, is_run, run_hint
from trainer.run.layout import ARTEFACTS, LOGS, SUBMISSION_FILE, SUBMISSION_ID_FILE
from trainer.safe_io.atomic import write_json, write_whole
from trainer.safe_io.plain import read_json
from trainer.safe_io.values import value_lines

if TYPE_CHECKING:
    from trainer.comm.backends import Launcher
    from trainer.config import Job


@dataclass(frozen=True)
class Submission:
    """Record in the run folder for status, logs and cancel.

    `clipship submit` writes it, or a batch script when it begins.
    """

    to: str
    """Name of the scheduler's row in `trainer.config.schedulers`."""
    id: str
    """Id that the scheduler gave the run."""
    at: str
    """Time of the submission, in UTC (ISO 8601)."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Further facts that this scheduler needs."""


Outcome = Literal["running", "done", "ended"]
"""running: its scheduler has it, in a queue too. done: it ended well. ended: it failed or was cancelled."""


class Scheduler(ABC):
    """One scheduler: how a job is rendered, checked and submitted there, and what became of it.

    `trainer.launch.schedulers` has them by name. The methods of a submission raise ClusterError if the
    scheduler does not answer or refuses.
    """

    same_files: ClassVar[bool] = True
    """False if its ranks see other files than this machine: they check the job's data when they start."""

    @abstractmethod
    def render(self, job: "Job") -> str:
        """Returns the text that is submitted. Pure; raises InputError."""

    @abstractmethod
    def validate(self, job: "Job") -> None:
        """Raises InputError with every reason why the job cannot run there."""

    @abstractmethod
    def starter(self, job: "Job") -> str:
        """Returns the program that starts the ranks of the job there, as messages name it."""

    def launcher(self, job: "Job") -> "Launcher | None":
        """Returns the launcher of the job's ranks there, as the backends know it; None if that is open."""
        return None

    def settled(self, job: "Job") -> tuple["Job", str]:
        """Returns the job as it goes there now, where that depends on files of this machine.

        The sentence says what was chosen; "" for nothing.
        """
        return job, ""

    def warnings(self, job: "Job") -> Iterator[str]:
        """Yields a sentence for each setting that is allowed but rarely meant."""
        yield from ()

    def summary(self, job: "Job") -> str:
        """Returns one line for `clipship check`; "" for none."""
        return ""

    def unique_name(self, job: "Job") -> str | None:
        """Returns the job's name there, which no other may have; None if names may be equal."""
        return None

    def record_folder(self, job: "Job") -> Path:
        """Returns the folder that keeps the record of the job's submission, whether it exists or not.

        The run folder, if this machine sees it.
        """
        from trainer.run.folder import run_folder

        return run_folder(job)

    def prepare(self, job: "Job") -> Path:
        """Make that folder for a checked job, with its artefacts, and return it."""
        folder = self.record_folder(job)
        make_artefacts_folder(folder, "choose another folder with --set logging.runs=FOLDER")
        return folder

    @abstractmethod
    def submit(self, job: "Job", folder: Path) -> Submission:
        """Write the submitted text into the folder's artefacts, and submit it. The folder exists."""

    def submit_together(
        self, runs: Sequence[tuple["Job", Path]], folder: Path, parallel: int | None
    ) -> Iterator[tuple[Path, Submission]]:
        """Submit the runs of a sweep; yields each one's folder with its submission as soon as it is there.

        `folder` is the sweep's. One that `takes_several` starts at most `parallel` of them at a time.
        """
        for job, own in runs:
            yield own, self.submit(job, own)

    @abstractmethod
    def adopt(self, job: "Job", folder: Path | None) -> tuple[Path, Submission] | None:
        """Find what was submitted for the job by hand, and record it.

        Returns it with its folder, None if there is nothing. `folder` is the run's folder, None if there is
        none here.
        """

    @abstractmethod
    def status(self, folder: Path, submission: Submission) -> list[tuple[str, str]]:
        """Returns topic and text, one line each; the first is `state`."""

    @abstractmethod
    def outcome(self, folder: Path, submission: Submission) -> Outcome:
        """Returns how far the run got. One that the scheduler has forgotten has ended."""

    @abstractmethod
    def cancel(self, folder: Path, submission: Submission) -> str:
        """End the run; returns a sentence on what happened."""

    def ends(self, submission: Submission) -> str:
        """Returns the scheduler's own command that ends a run, for a run without a record."""
        return f"ask {submission.to} to end {submission.id}"

    @abstractmethod
    def log_lines(
        self, folder: Path, submission: Submission, rank: int | None, follow: bool
    ) -> Iterator[str] | None:
        """Returns the ranks' output in the order of time; None if it is in the run folder's log files."""


def make_artefacts_folder(run_folder: Path, advice: str) -> None:
    """Make the run folder with its folder of artefacts.

    Raises InputError, which ends with the advice, if that fails, or if it would make a folder in /: that is
    where file systems of a cluster are mounted, and this machine lacks this one.
    """
    folder = run_folder / ARTEFACTS
    top = next((part for part in folder.absolute().parents if part.parent == Path("/")), None)
    if top is not None and not top.exists():
        raise InputError(
            f"{run_folder} cannot be made: this machine has no {top}. Start from a machine that sees it, "
            f"make {top} yourself, or {advice}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder} cannot be made: {problem.strerror}; {advice}") from None


@contextmanager
def removed_if_refused(folders: Iterable[Path]) -> Iterator[set[Path]]:
    """Removes, if the block's submission is refused, what it made in those folders that hold no run yet.

    Otherwise they would look like runs that wait in a queue. The block takes what its scheduler has got out
    of the set of these folders.
    """
    new = {folder for folder in folders if not is_run(folder)}
    try:
        yield new
    except NoAnswer:
        raise
    except (InputError, ClusterError, OSError):
        for folder in new:
            if not (folder / ARTEFACTS / SUBMISSION_FILE).exists():
                shutil.rmtree(folder / ARTEFACTS, ignore_errors=True)
                for empty in (folder / LOGS, folder):
                    with suppress(OSError):
                        empty.rmdir()
        raise


def announce(folder: Path, submission: Submission, ends: str) -> None:
    """Print the id of a run that its scheduler has got, and record it.

    Raises ClusterError if no record can be written, with `ends`, the command that ends such a run.
    """
    print(submission.id, flush=True)
    try:
        record(folder, submission)
    except OSError as problem:
        raise ClusterError(
            f"{submission.to} has got the run as {submission.id}, but the record of it cannot be written "
            f"({problem.filename or folder}: {problem.strerror}), so that `clipship cancel` does not know "
            f"it. To end it: {ends}"
        ) from None


def record(folder: Path, submission: Submission) -> None:
    """Write the record into the run folder, whole or not at all; the batch script reads the id alone."""
    write_whole(folder / ARTEFACTS / SUBMISSION_ID_FILE, value_lines({"id": submission.id}))
    write_json(folder / ARTEFACTS / SUBMISSION_FILE, asdict(submission))


def read_record(folder: Path) -> Submission | None:
    """Returns the run's record; None for a run that was not submitted.

    Raises InputError if the record cannot be read.
    """
    path = folder / ARTEFACTS / SUBMISSION_FILE
    try:
        submission = Submission(**read_json(path))
        _check(submission)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise InputError(f"{path}: you may not read it: ask who submitted the run") from None
    except (OSError, ValueError, TypeError) as problem:
        raise InputError(
            f"{path} cannot be read ({problem}), so nobody knows where the run was submitted: submit it again"
        ) from None
    return submission


def _check(submission: Submission) -> None:
    """Raises ValueError for a record that is not as its scheduler's row says; others may have written it."""
    details = submission.details
    if not all(isinstance(value, str) for value in (submission.to, submission.id, submission.at)):
        raise ValueError("its to, id and at are not texts")
    if not isinstance(details, dict) or not all(isinstance(value, str) for value in details.values()):
        raise ValueError("its details are not texts by name")
    if (row := SCHEDULERS.get(submission.to)) is None:
        raise ValueError(f"unknown scheduler {submission.to!r}; known are {', '.join(SCHEDULERS)}")
    if missing := [name for name in row.details if name not in details]:
        raise ValueError(f"its details have no {', '.join(missing)}")
    wrong = [
        f"{name} {value!r}"
        for name, value in {"id": submission.id, **details}.items()
        if not re.fullmatch(row.forms.get(name, ".*"), value, re.ASCII | re.DOTALL)
    ]
    if wrong:
        raise ValueError(f"{row.name} gives no {', no '.join(wrong)}")


def find_run(name: str) -> Path:
    """Returns the run folder that the user means.

    `name` is the folder itself, a job file, or a name in the folder `runs`. Raises InputError if there is
    none.
    """
    path = Path(name)
    if is_run(path):
        return path
    if path.is_file():
        from trainer.config.loader import load_job
        from trainer.run.folder import run_folder

        job = load_job(path)
        # the second has the record if the ranks see other files than this machine
        for path in (run_folder(job), HERE / job.name):
            if is_run(path):
                return path
        raise InputError(
            f"{name} has no run folder here: there is neither {run_folder(job)} nor runs/{job.name}. The run "
            "has not started, or it was submitted from another folder."
        )
    if "/" not in name and is_run(HERE / name):
        return HERE / name
    raise InputError(
        f"{name} is not a run: give a run folder, a job file, or the name of a run in ./runs{run_hint(name)}"
    )
