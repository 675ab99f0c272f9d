"""Claims of generations in the run folder: of two halves of a cut network only one goes on.

A coordinator that starts a generation makes the file of its number, which only one can make. The loser ends
its own ranks and writes nothing. A rank that lives beyond the loss of its supervisor's neighbours is ended by
its supervisor at once, a rank without a supervisor by the kernel, and one whose supervisor stands still by
its lease; so when a generation is claimed, no rank of the one before it writes any more. Imports no torch.
"""

import errno
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.run.layout import GENERATIONS, generation_file
from trainer.safe_io.atomic import is_void, make_once, write_json
from trainer.safe_io.plain import read_as


@dataclass(frozen=True)
class GenerationClaim:
    """Coordinator of one generation, and where the other supervisors reach it."""

    start: str
    """Start of the run, as `Rendezvous.start` names it."""
    generation: int
    member: int
    node: str
    host: str = ""
    port: int = 0
    world: str = ""
    """World that it starts, as `WorldPlan.to_text` writes it; "" if it is the first or none starts."""


def claim(run_folder: Path, its: GenerationClaim) -> GenerationClaim | None:
    """Claims a generation; returns None if that succeeded, else the claim that was there before.

    Where that is void, returns the claimer's own, so that the number is passed over. Raises OSError if the
    folder cannot be written, or if the claim that was there cannot be read.
    """
    folder = run_folder / GENERATIONS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / generation_file(its.generation)
    if make_once(path, json.dumps(asdict(its))):
        return None
    if is_void(path):
        return its
    if (other := read_as(GenerationClaim, path)) is None:
        why = f"{GENERATIONS}/{path.name}, which another supervisor has made, cannot be read"
        raise OSError(errno.EAGAIN, why, str(path))
    return other


def announce(run_folder: Path, its: GenerationClaim) -> None:
    """Tells where one that comes back finds the coordinator that waits for it; it claims nothing.

    Raises OSError.
    """
    path = run_folder / GENERATIONS / generation_file(its.generation)
    write_json(path.with_stem(f"{path.stem}-awaited"), asdict(its))  # before the claim, in their order


def newest_claim(run_folder: Path, start: str) -> GenerationClaim | None:
    """Returns the claim of the newest generation of this start, or what was announced of it; else None."""
    with suppress(OSError):
        for path in sorted((run_folder / GENERATIONS).glob("[0-9]*.json"), reverse=True):
            its = read_as(GenerationClaim, path)
            if its is not None and its.start == start:
                return its
    return None


def remove_claims(run_folder: Path, start: str) -> None:
    """Removes the claims of earlier starts. Raises OSError."""
    for path in (run_folder / GENERATIONS).glob("[0-9]*.json"):
        its = read_as(GenerationClaim, path)
        if its is None or its.start != start:
            path.unlink(missing_ok=True)
