"""Record of the starts of a run: how many there were, and how many have failed in a row.

Whoever starts the ranks adds to it, in lines `NAME=value`: the launcher pod of an MPIJob here, Slurm's batch
script in its own language. It outlives both: the next pod or the next start of the job counts on. Imports no
torch.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.run.layout import ARTEFACTS, STARTS_FILE
from trainer.safe_io.plain import open_plain, read_plain
from trainer.safe_io.values import last_values, value_lines

RECORD = Path(ARTEFACTS, STARTS_FILE)
"""Path of the record in the run folder."""
_NUMBERS = ("starts", "failures", "saved_step", "final")


@dataclass(frozen=True)
class StartsSoFar:
    """Starts of one submission."""

    job: str
    """Id or uid that the scheduler gave it; a new submission has another one and begins anew."""
    starts: int = 0
    failures: int = 0
    """Failures in a row without a new checkpoint in between."""
    saved_step: int = 0
    """Step of the newest checkpoint at the last failure; 0 for none."""
    again: bool = True
    """True if another start follows the last one."""
    final: int | None = None
    """Exit code with which the run ended for good; later launchers leave with it. None while it goes on."""
    message: str = ""


def read_starts(run_folder: Path, job: str) -> StartsSoFar:
    """Returns the last record of this submission; an empty one if there is none."""
    with suppress(OSError, ValueError):
        *_, last = read_plain(run_folder / RECORD).rstrip("\n").split("\n\n")
        values = last_values(last)
        if values.get("job") == job:
            numbers = {name: int(values[name]) for name in _NUMBERS if name in values}
            again = values.get("again") != "no"
            return StartsSoFar(job, again=again, message=values.get("message", ""), **numbers)
    return StartsSoFar(job)


def add_starts(run_folder: Path, record: StartsSoFar) -> None:
    """Adds a record, which is the last one from now on. Raises OSError."""
    path = run_folder / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", opener=open_plain) as file:
        file.write(value_lines(asdict(record)) + "\n")
