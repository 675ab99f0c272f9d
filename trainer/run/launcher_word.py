"""The word of a start's supervisors to whoever has started them: to start them again, or how the run ended.

It is one file of lines `NAME=value`, so that a batch script can read it. A start has the last word that was
written, and after its end no other. Imports no torch.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.run.exit_record import STOPPED_THEN, SUPERVISOR_LOST, ExitRecord
from trainer.run.layout import ARTEFACTS, LAUNCHER_FILE
from trainer.safe_io.atomic import json_text, write_whole
from trainer.safe_io.plain import parse_json
from trainer.safe_io.values import read_values, value_lines
from trainer.text.masking import masked_values

WORD = Path(ARTEFACTS, LAUNCHER_FILE)
"""Path of the file in the run folder."""
Word = Literal["again", "again-if-killed", "end"]
"""again: all supervisors are to be started again; again-if-killed: only if all were killed before one of them
could ask; end: the run has ended."""


@dataclass(frozen=True)
class StartRequest:
    """Request of a start's supervisors to be started again."""

    record: ExitRecord
    """Record of the fault, with the generation to start."""
    steps_done: int = 0
    """Last step that was done, as far as the writer knows; 0 if it does not know."""
    in_memory: int = 0
    """Newest step in the memory of the writer's node; 0 if there is none."""
    fault_step: int = 0
    """Step that the rank of the record was working on; 0 if it is not known or a supervisor is gone."""


def ask(run_folder: Path, start: str, its: StartRequest, *, if_killed: bool) -> None:
    """Asks for the generation of the request's record. Raises OSError.

    What is asked for in case that all are killed takes nothing back that was asked for in earnest.
    """
    before = read_values(run_folder / WORD)
    generation = its.record.generation
    asked = [before.get(name) for name in ("start", "word", "generation")]
    if if_killed and asked == [start, "again", str(generation)]:
        return
    word: Word = "again-if-killed" if if_killed else "again"
    request = json_text(masked_values(asdict(its)))
    _tell(run_folder, start, word, {"generation": generation, "request": request})


def withdraw(run_folder: Path, start: str) -> None:
    """Withdraws what this start has asked for in case that all are killed. Raises OSError."""
    before = read_values(run_folder / WORD)
    if (before.get("start"), before.get("word")) == (start, "again-if-killed"):
        (run_folder / WORD).unlink()


def tell_end(run_folder: Path, start: str, record: Mapping[str, Any]) -> None:
    """Tells how the run ended; `record` has the fields of an `ExitRecord`. Raises OSError."""
    names = ("exit_code", "rank", "node", "reason", "left_out")
    reason = str(record.get("reason"))
    flags = {"saved": not reason.startswith(STOPPED_THEN), "lost": reason.startswith(SUPERVISOR_LOST)}
    _tell(run_folder, start, "end", {name: record.get(name) for name in names} | flags)


def _tell(run_folder: Path, start: str, word: Word, values: Mapping[str, Any]) -> None:
    path = run_folder / WORD
    before = read_values(path)
    if word == "end" or (before.get("start"), before.get("word")) != (start, "end"):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, value_lines({"start": start, "word": word, **values}))


def requested_start(run_folder: Path, start: str) -> StartRequest | None:
    """Returns the request of this start to start all supervisors again; None if there is none.

    A batch script that takes one for the case that all are killed adds `word=again` and the time of the end.
    """
    values = read_values(run_folder / WORD)
    if (values.get("start"), values.get("word")) != (start, "again"):
        return None
    with suppress(KeyError, ValueError, TypeError):
        found = dict(parse_json(values["request"]))
        record = ExitRecord(**found.pop("record"))
        at = float(values.get("time", record.time))
        return StartRequest(ExitRecord(**{**vars(record), "time": at}), **found)
    return None
