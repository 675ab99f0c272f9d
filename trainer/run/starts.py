"""Record of the starts of a run: how many there were, and how many have failed in a row.

Whoever starts the ranks adds to it, in lines `NAME=value`: the launcher pod of an MPIJob here, Slurm's batch
script in its own language. It outlives both: the next pod or the next start of the job counts on. Imports no
torch.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from trainer.run.layout import ARTEFACTS, STARTS_FILE
from trainer.safe_io.plain import open_plain, read_plain
from trainer.safe_io.values import last_values, value_lines

RECORD = Path(ARTEFACTS, STARTS_FILE)
"""Path of the record in the run folder."""


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
    code: int = 0
    """Exit code of the last start."""
    over: bool = False
    """True if the run has ended for good: later launchers leave with the code."""
    message: str = ""


def starts_of(text: str) -> StartsSoFar:
    """Returns the record with these lines, as `add_starts` writes it. Raises ValueError if one is missing."""
    values = last_values(text)
    if missing := [each.name for each in fields(StartsSoFar) if each.name not in values]:
        raise ValueError(f"no record of starts: it has no {missing[0]}")
    numbers = {name: int(values[name]) for name in ("starts", "failures", "saved_step", "code")}
    over, message = values["over"] == "yes", values["message"]
    return StartsSoFar(values["job"], over=over, message=message, **numbers)


def read_starts(run_folder: Path, job: str) -> StartsSoFar:
    """Returns the last record of this submission; an empty one if there is none."""
    with suppress(OSError, ValueError):
        for lines in reversed(read_plain(run_folder / RECORD).split("\n\n")):
            with suppress(ValueError):  # a launcher was killed, or the disk was full, while it wrote this one
                last = starts_of(lines)
                return last if last.job == job else StartsSoFar(job)
    return StartsSoFar(job)


def add_starts(run_folder: Path, record: StartsSoFar) -> None:
    """Adds a record, which is the last one from now on. Raises OSError."""
    path = run_folder / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", opener=open_plain) as file:
        before = "\n" if file.tell() else ""  # the last line of the record before may have no end
        file.write(before + value_lines(asdict(record)) + "\n")
