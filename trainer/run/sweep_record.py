"""The folder of a sweep, beside the folders of its runs: which runs there are, and with which values.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import InputError
from trainer.run.layout import SWEEP_FILE
from trainer.run.lock import alone
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import read_json

_ENDING = "-sweep"


@dataclass(frozen=True)
class SweepRecord:
    """Runs of all sweeps of a job."""

    job: str
    """Name of the job, with which the names of its runs begin."""
    runs: Mapping[str, Mapping[str, str]]
    """Name of each run, which is that of its folder, with its values by key."""


def sweep_folder(runs: Path, job: str) -> Path:
    """Returns the folder of a job's sweeps; `runs` holds the folders of its runs."""
    return runs / f"{job}{_ENDING}"


def is_sweep(folder: Path) -> bool:
    """Returns whether the folder is one of a sweep."""
    return (folder / SWEEP_FILE).is_file()


def read_sweep(folder: Path) -> SweepRecord:
    """Returns the record of a sweep. Raises InputError if there is none or it cannot be read."""
    path = folder / SWEEP_FILE
    try:
        content = read_json(path)
        runs = {
            str(name): {str(key): str(value) for key, value in values.items()}
            for name, values in content["runs"].items()
            if name not in ("", ".", "..") and "/" not in name  # no way out of the folder
        }
        return SweepRecord(str(content["job"]), runs)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as problem:
        raise InputError(
            f"{path} cannot be read ({problem}): start the sweep again, which writes it and leaves runs that "
            "are done as they are"
        ) from None


def record_sweep(folder: Path, record: SweepRecord) -> None:
    """Add runs to the record of earlier sweeps of the job. Raises InputError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            try:
                before = read_sweep(folder).runs
            except InputError:
                before = {}
            write_json(folder / SWEEP_FILE, {"job": record.job, "runs": {**before, **record.runs}})
    except OSError as problem:
        raise InputError(
            f"{folder} cannot be written: {problem.strerror}; choose another folder with --set logging.runs"
        ) from None
