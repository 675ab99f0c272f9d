"""Table of what schedulers do, and submission to them. Imports none before it is needed."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.schedulers import SCHEDULERS
from trainer.errors import ClusterError, InputError
from trainer.launch.submission import (
    Scheduler,
    Submission,
    announce,
    find_run,
    read_record,
    removed_if_refused,
)
from trainer.run.find import remember
from trainer.run.layout import ARTEFACTS
from trainer.run.lock import alone
from trainer.text.terminal import say

if TYPE_CHECKING:
    from trainer.comm.backends import Launcher
    from trainer.config import Job


def _slurm() -> Scheduler:
    from trainer.launch.slurm.scheduler import SlurmScheduler

    return SlurmScheduler()


def _kubernetes() -> Scheduler:
    from trainer.launch.kubernetes.scheduler import KubernetesScheduler

    return KubernetesScheduler()


IMPLEMENTATIONS: dict[str, Callable[[], Scheduler]] = {"slurm": _slurm, "kubernetes": _kubernetes}
"""Functions that import and make each scheduler of `trainer.config.schedulers`, by its name."""


def scheduler(name: str) -> Scheduler:
    """Returns the scheduler, for what asks no cluster."""
    return IMPLEMENTATIONS[name]()


def reachable(name: str) -> Scheduler:
    """Returns the scheduler, for what asks its cluster.

    Raises InputError if the client that this needs is not installed.
    """
    needs = SCHEDULERS[name].client
    if needs is not None and find_spec(needs) is None:
        raise InputError(
            f"{name} needs the Python package {needs}, which {sys.executable} does not have: pip install "
            "'clipship[launch]'"
        )
    return scheduler(name)


def launchers_of(job: "Job", *, local: bool = False) -> list["Launcher"]:
    """Returns the launcher of the job's ranks under each of its schedulers; without any, `clipship run`'s.

    `local`: on this machine, whatever schedulers it has.
    """
    from trainer.comm.backends import launcher_for

    asked = [scheduler(name).launcher(job) for name in ([] if local else job.schedulers)]
    several = not local and job.resources.nodes > 1
    return [launcher for launcher in asked if launcher] or [launcher_for(job, several_hosts=several)]


def find_submission(name: str) -> tuple[Path, Submission | None]:
    """Returns the run folder as `find_run` does, with the run's record.

    It also finds a run submitted by hand, if a scheduler of the job file knows it.
    """
    try:
        folder = find_run(name)
    except InputError as missing:
        try:
            adopted = _adopted(Path(name), None)
        except (ClusterError, InputError) as problem:
            raise InputError(f"{missing}; its cluster could not be asked: {problem}") from None
        if adopted is None:
            raise
        return adopted
    submission = read_record(folder)
    if submission is None:
        with suppress(ClusterError, InputError):  # the folder's own files are enough
            return _adopted(Path(name), folder) or (folder, None)
    return folder, submission


def _adopted(path: Path, folder: Path | None) -> tuple[Path, Submission] | None:
    """Returns what was submitted by hand for a job file; None if there is nothing or `path` is no file."""
    if not path.is_file():
        return None
    from trainer.config.loader import load_job

    job = load_job(path)
    answers = (reachable(name).adopt(job, folder) for name in job.schedulers)
    return next((adopted for adopted in answers if adopted is not None), None)


def submit(job: "Job", to: str, warnings: Iterable[str]) -> Path:
    """Submit a job that has been checked, and print its id; returns the folder that keeps the record.

    The warnings are said before the scheduler gets the job.
    """
    control = reachable(to)
    [job] = settled([job], to)
    own = control.record_folder(job)
    with ExitStack() as one_at_a_time:
        with refused_if_unwritable(own), removed_if_refused([own]):
            folder = prepare(job, to)
            for warning in warnings:
                say(f"warning: {warning}")
            one_at_a_time.enter_context(alone(folder / ARTEFACTS))  # the next one sees this one's record
            submission = control.submit(job, folder)
        announce(folder, submission, control.ends(submission))
    return folder


@contextmanager
def refused_if_unwritable(folder: Path) -> Iterator[None]:
    """Raises InputError if the block cannot write a file; one without a name is in `folder`."""
    try:
        yield
    except OSError as problem:
        raise InputError(
            f"{problem.filename or folder}: {problem.strerror}; choose another folder with "
            "--set logging.runs=FOLDER"
        ) from None


def settled(jobs: Iterable["Job"], to: str) -> list["Job"]:
    """Returns the jobs as they go to the scheduler now, and says what was chosen for them."""
    place = scheduler(to)
    found = [place.settled(job) for job in jobs]
    for sentence in dict.fromkeys(sentence for _, sentence in found if sentence):
        say(sentence)
    return [job for job, _ in found]


def prepare(job: "Job", to: str) -> Path:
    """Make the folder that keeps the record of the job's submission, with its artefacts; return it."""
    folder = scheduler(to).prepare(job)
    remember(folder.parent)
    return folder
