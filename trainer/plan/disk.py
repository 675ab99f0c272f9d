"""Text of `clipship check` about checkpoints: their size, and how many the disk takes. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import Job
from trainer.copies.copied_run import CopiedRun
from trainer.errors import problems_of
from trainer.estimate.size import checkpoint_bytes
from trainer.model.catalog import known_models
from trainer.preflight.host_probe import disk_bytes, try_place
from trainer.run.checkpoints import step_folders
from trainer.run.folder import run_folder
from trainer.run.layout import CHECKPOINTS
from trainer.text.wording import in_gb, many


@dataclass(frozen=True)
class Disk:
    """Free bytes of the disk that gets the run folder."""

    folder: Path
    """Folder that was asked."""
    free: int
    checkpoints: int
    """Checkpoints that the run folder holds already, whose place later ones take."""
    findings: Sequence[str] = ()
    """Sentences about what its file system lacks, or why no run can begin there."""


def disk_of(job: Job, *, local: bool) -> Disk | None:
    """Returns the disk of the run folder; None if this machine may not see it.

    The ranks of a cluster (not `local`) may write to a disk that is not mounted here. Then `logging.runs`, or
    the folder that has it, must exist here.
    """
    folder = run_folder(job)
    parents = (folder, *folder.parents)
    seen = next((path for path in (parents if local else parents[:3]) if path.is_dir()), None)
    free = None if seen is None or (not local and seen == Path(seen.anchor)) else disk_bytes(seen)
    if seen is None or free is None:
        return None
    findings: list[str] = []
    findings += problems_of([lambda: findings.extend(try_place(job, folder))])
    return Disk(seen, free, len(step_folders(folder / CHECKPOINTS)), findings)


def checkpoint_rows(job: Job, disk: Disk | None) -> Iterator[tuple[str, str]]:
    """Yields the row about checkpoints: their size if the model's is known, how many are kept and fit."""
    size, keep = checkpoint_bytes(job), job.checkpoint.keep
    kept = f"{keep} kept" if job.checkpoint.best is None else f"{keep} and the best one kept"
    if size is None:
        config = f"the config of {job.model.name} does not say how large they are"
        text = f"{kept}; {config if known_models() else 'without open_clip here their size is not known'}"
        room = f"; {in_gb(disk.free)} are free in {disk.folder}" if disk else ""
    else:
        parts = f"weights {in_gb(size.weights)}, optimizer {in_gb(size.optimizer)}"
        parts += f", EMA {in_gb(size.ema)}" if size.ema else ""
        text = f"{in_gb(size.total)} each ({parts}), {kept}"
        room = (
            f"; {disk.free // size.total:,} fit the {in_gb(disk.free)} free in {disk.folder}" if disk else ""
        )
    yield "checkpoints", text + room
    if (to := CopiedRun.of(job)) is not None:
        yield "copies", f"each whole checkpoint goes to {to.address}, where {kept}"


def too_little_disk(job: Job, disk: Disk | None) -> Iterator[str]:
    """Yields what the disk lacks, and a sentence if it does not hold the checkpoints that the job keeps.

    A new one is written before the oldest is removed, so there is one more for a while.
    """
    size = checkpoint_bytes(job)
    yield from disk.findings if disk is not None else ()
    if disk is None or size is None:
        return
    count = job.checkpoint.keep + 1 + (job.checkpoint.best is not None)
    needed = size.total * max(0, count - disk.checkpoints)
    if needed > disk.free:
        yield (
            f"the run keeps up to {many(count, 'checkpoint')}, of which the last is being written: they take "
            f"{in_gb(needed)}, and {disk.folder} has {in_gb(disk.free)} free: "
            f"{'lower checkpoint.keep, or ' if job.checkpoint.keep > 1 else ''}"
            "set logging.runs to a folder on a larger disk"
        )
