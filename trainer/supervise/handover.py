"""Hands a step in a node's memory over to the ranks of other nodes, by way of the run folder.

A node that is left out of the next world may be the only one with the newest step: its supervisor lives, but
it has no rank that could send the step. The supervisor copies the step's files into the run folder, and
rank 0 reads them there, with headers and checksums as in memory. No torch.
"""

import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.run.layout import HANDED_OVER
from trainer.safe_io.plain import open_plain
from trainer.supervise.state_parts import files_of, whole_steps

STALLED_S = 20.0
"""Seconds without a new byte after which nobody waits for a step any more."""
_POLL_S = 0.05
_PIECE = 1 << 24


def giver_of(kept: Mapping[int, int], world: Collection[int], saved_step: int) -> int | None:
    """Returns a member that has the newest step in its node's memory if no rank and no checkpoint has it.

    `kept` has the newest step of each member's node, `world` are the members that have a rank, and
    `saved_step` is the step of the newest checkpoint.
    """
    newest = max(kept.values(), default=0)
    others = max((kept.get(member, 0) for member in world), default=0)
    if newest <= max(others, saved_step):
        return None
    return min(member for member, step in kept.items() if step == newest)


def give(
    run_folder: Path, generation: int, state: Path, start: str, goes_on: Callable[[], bool] = lambda: True
) -> None:
    """Copies the newest whole step of the folder `state` for rank 0 of a generation.

    It does nothing without such a step, and stops once `goes_on` returns False. Raises OSError.
    """
    steps = whole_steps(state, start)
    if not steps:
        return
    remove(run_folder)
    whole, part = _places(run_folder, generation)
    part.parent.mkdir(mode=0o700, exist_ok=True)
    part.mkdir(mode=0o700)
    for name in files_of(steps[0]):
        with (
            open(state / name, "rb", opener=open_plain) as source,
            open(part / name, "xb", opener=open_plain) as copy,
        ):
            while piece := source.read(_PIECE):
                if not goes_on():
                    return
                copy.write(piece)
                copy.flush()
    part.rename(whole)


def take(run_folder: Path, generation: int, stalled_s: float = STALLED_S) -> Path | None:
    """Waits for the step of a generation; returns its folder, or None if no byte comes for `stalled_s`."""
    whole, part = _places(run_folder, generation)
    copied, since = -1, time.monotonic()
    while not whole.is_dir():
        size = 0
        with suppress(OSError):
            size = sum(path.stat().st_size for path in part.iterdir())
        if size != copied:
            copied, since = size, time.monotonic()
        elif time.monotonic() - since > stalled_s:
            return None
        time.sleep(_POLL_S)
    return whole


def remove(run_folder: Path) -> None:
    """Removes all that was handed over, as far as possible."""
    shutil.rmtree(run_folder / HANDED_OVER, ignore_errors=True)


def _places(run_folder: Path, generation: int) -> tuple[Path, Path]:
    """Returns the folder of a generation's step, and its name while it is being written."""
    name = f"{generation:05d}"
    return run_folder / HANDED_OVER / name, run_folder / HANDED_OVER / f"{name}.part"
