"""Counts the starts of the ranks in the run folder, and decides what follows when one ends.

The record outlives a launcher pod: a new one knows whether the run has ended for good, and how many failures
there were. Imports no torch.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED
from trainer.run.checkpoints import complete_checkpoints
from trainer.run.layout import ARTEFACTS, CHECKPOINTS, LAUNCHER_FILE
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import read_json

RECORD = Path(ARTEFACTS, LAUNCHER_FILE)
"""Path of the record in the run folder."""


@dataclass(frozen=True)
class AttemptRecord:
    """Record of one submission's starts."""

    job: str
    """Uid of the launcher's or the pods' Job; a new submission has another one and begins a new record."""
    starts: int = 0
    failures: int = 0
    """Consecutive failures without a new checkpoint in between."""
    checkpoint: str = ""
    """Newest checkpoint when the last failure was counted."""
    final: int | None = None
    """Exit code with which the run ended for good; later launchers leave with it. None while the run goes
    on."""
    message: str = ""


@dataclass(frozen=True)
class Decision:
    """Next action of the launcher, with its updated record."""

    action: Literal["leave", "again"]
    record: AttemptRecord


def read_attempts(run_folder: Path, job: str) -> AttemptRecord:
    """Returns the record of an earlier launcher of this submission; an empty one if there is none."""
    try:
        stored = AttemptRecord(**read_json(run_folder / RECORD))
    except (OSError, ValueError, TypeError):
        return AttemptRecord(job)
    return stored if stored.job == job else AttemptRecord(job)


def write_attempts(run_folder: Path, record: AttemptRecord) -> None:
    """Write the record, whole or not at all."""
    path = run_folder / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(record))


def newest_checkpoint(run_folder: Path) -> str:
    """Returns the name of the newest checkpoint's folder; "" if there is none."""
    return max((path.name for path in complete_checkpoints(run_folder / CHECKPOINTS)), default="")


def decide(
    record: AttemptRecord, code: int, *, asked: bool, checkpoint: str, retries: int, message: str
) -> Decision:
    """Decide what follows from the ranks' exit code.

    `asked` says that this launcher was asked to stop. A run also ends with 75 if a worker was asked to stop;
    it is then started again.
    """
    if asked and code != EXIT_DONE:
        return Decision("leave", replace(record, message=message))  # the next launcher resumes the run
    if code in (EXIT_DONE, EXIT_BAD_INPUT):
        return Decision("leave", replace(record, final=code, message=message))
    if code == EXIT_PREEMPTED:
        return Decision("again", record)
    failures = 1 + (record.failures if checkpoint == record.checkpoint else 0)
    counted = replace(record, failures=failures, checkpoint=checkpoint, message=message)
    return (
        Decision("again", counted) if failures <= retries else Decision("leave", replace(counted, final=code))
    )
