"""Hands a step in a node's memory over to the ranks of other nodes, by way of the run folder.

A node that is left out of the next world may be the only one with the newest step: its supervisor lives, but
it has no rank that could send the step. The supervisor copies the step's files into the run folder, and
rank 0 reads them there, with headers and checksums as in memory. No torch.
"""

import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.run.generations import remove_handed_over
from trainer.run.layout import HANDED_OVER
from trainer.run.retry import names_in, shown
from trainer.safe_io.plain import open_plain
from trainer.world.state_parts import files_of, whole_steps

_POLL_S = 0.1
_PIECE = 1 << 24


def give(run_folder: Path, generation: int, state: Path, start: str, goes_on: Callable[[], bool]) -> None:
    """Copies the newest whole step of the folder `state` for rank 0 of a generation.

    If that fails, it leaves an empty folder, so that rank 0 waits no longer. It stops once `goes_on` returns
    False. Raises OSError.
    """
    if not goes_on():
        return
    whole, part = _places(run_folder, generation)
    remove_handed_over(run_folder)
    try:
        part.parent.mkdir(mode=0o700, exist_ok=True)
        if not stat.S_ISDIR(part.parent.lstat().st_mode):
            raise NotADirectoryError(f"{part.parent} is a link")
        part.mkdir(mode=0o700)
        steps = whole_steps(state, start)
        if not steps:
            raise FileNotFoundError(f"{state} has no whole step")
        for name in files_of(steps[0]):
            if not _copy(state / name, part / name, goes_on):
                return
        part.rename(whole)
    except OSError:
        with suppress(OSError):
            whole.mkdir(mode=0o700)
        shutil.rmtree(part, ignore_errors=True)
        raise


def take(run_folder: Path, generation: int, longest_s: float) -> Path | None:
    """Waits up to `longest_s` for the step of a generation; returns its folder, or None."""
    whole, _ = _places(run_folder, generation)
    there = shown(lambda: whole.name in names_in(whole.parent), run_folder, longest_s, _POLL_S)
    return whole if there else None


def _copy(source: Path, copy: Path, goes_on: Callable[[], bool]) -> bool:
    """Copies a file piece by piece; returns False if it was stopped. Raises OSError."""
    with open(source, "rb", opener=open_plain) as its, open(copy, "xb", opener=open_plain) as own:
        while piece := its.read(_PIECE):
            if not goes_on():
                return False
            own.write(piece)
    return goes_on()


def _places(run_folder: Path, generation: int) -> tuple[Path, Path]:
    """Returns the folder of a generation's step, and its name while it is being written."""
    name = f"{generation:05d}"
    return run_folder / HANDED_OVER / name, run_folder / HANDED_OVER / f"{name}.part"
