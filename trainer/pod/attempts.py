"""How often the launcher starts the ranks: what it remembers in the run folder, and what follows from an end. No torch.

The memory outlives a launcher pod: a new one knows that the run has ended for good, and how many failures came before.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED
from trainer.inputs.checkpoints import whole_in
from trainer.whole_file import write_json

MEMORY = Path("artefacts", "launcher.json")
"""In the run folder."""


@dataclass(frozen=True)
class Memory:
    """Of one submission."""

    job: str
    """The launcher Job's uid: another submission begins anew."""
    starts: int = 0
    failures: int = 0
    """In a row, with no new checkpoint in between."""
    checkpoint: str = ""
    """The newest one when the last failure was counted."""
    final: int | None = None
    """The exit code with which the run ended for good; launchers that come later leave with it."""
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the launcher does now."""

    action: Literal["leave", "again"]
    memory: Memory


def read_memory(run_folder: Path, job: str) -> Memory:
    """What an earlier launcher of this submission left; an empty one otherwise."""
    try:
        found = Memory(**json.loads((run_folder / MEMORY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Memory(job)
    return found if found.job == job else Memory(job)


def write_memory(run_folder: Path, memory: Memory) -> None:
    """Whole or not at all."""
    path = run_folder / MEMORY
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(memory))


def newest_checkpoint(run_folder: Path) -> str:
    """Its folder's name, "" where there is none."""
    return max((path.name for path in whole_in(run_folder / "checkpoints")), default="")


def verdict(memory: Memory, code: int, *, asked: bool, checkpoint: str, retries: int, message: str) -> Verdict:
    """`asked`: somebody asked this launcher to stop; a worker that was asked also ends a run with 75, which then goes on without it."""
    if asked and code != EXIT_DONE:
        return Verdict("leave", replace(memory, message=message))  # the next launcher goes on
    if code in (EXIT_DONE, EXIT_BAD_INPUT):
        return Verdict("leave", replace(memory, final=code, message=message))
    if code == EXIT_PREEMPTED:
        return Verdict("again", memory)
    failures = 1 + (memory.failures if checkpoint == memory.checkpoint else 0)
    counted = replace(memory, failures=failures, checkpoint=checkpoint, message=message)
    return Verdict("again", counted) if failures <= retries else Verdict("leave", replace(counted, final=code))
