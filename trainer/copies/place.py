"""Checks of the place that gets a run's copies, before the first step. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.files import BrokenCheckpoint
from trainer.checkpoint.identity import RunIdentity, check_facts
from trainer.comm.rank_zero import of_rank_0
from trainer.config import Job
from trainer.config.stores import store_of
from trainer.copies.copied_run import CopiedRun
from trainer.data.store import check_writable
from trainer.errors import InputError, StorageError
from trainer.run.folder import check_writable_folder, run_folder
from trainer.text.wording import many

if TYPE_CHECKING:  # protocol imports torch, which `clipship check` does not need
    from trainer.comm.protocol import Comm


def check_copies(job: Job, comm: "Comm") -> None:
    """Collective: raises InputError on every rank if the job wants copies that cannot be written."""
    if (to := CopiedRun.of(job)) is not None and (away := check_together(job, comm, to, (), begins=False)):
        raise StorageError(away)


def check_together(
    job: Job, comm: "Comm", to: CopiedRun, identities: Sequence[RunIdentity], *, begins: bool
) -> str:
    """Collective: runs `check_place` on rank 0, and raises its InputError on every rank.

    Returns what is said of a store that does not answer, "" for one that does.
    """

    def check() -> str:
        try:
            check_place(job, to, identities, begins=begins)
        except StorageError as error:
            return str(error)
        return ""

    return str(of_rank_0(comm, check))


def check_place(job: Job, to: CopiedRun, identities: Sequence[RunIdentity], *, begins: bool) -> None:
    """Raises InputError if copies cannot be written there, or if others lie there; leaves nothing behind.

    `identities` are those of the run's stages, none where they are not known yet.
    """
    if store_of(to.address):
        check_writable(to.address)
    else:
        check_writable_folder(Path(to.address), "copies", "checkpoint.copy_to")
        if Path(to.address).resolve() == run_folder(job).resolve():
            raise InputError(
                f"checkpoint.copy_to = {job.checkpoint.copy_to} is logging.runs, too: give another folder"
            )
    if begins and (whole := to.whole()):
        raise InputError(
            f"{to.address} has copies of a run of this name, the newest of them {whole[-1]}, and this one "
            f"would take their place: `clipship resume {to.address}` goes on with it; or choose another name "
            f"with --set name=..., or remove the {many(len(whole), 'copy', 'copies')}"
        )
    refuse_another_run(to, identities)


def refuse_another_run(to: CopiedRun, identities: Sequence[RunIdentity]) -> None:
    """Raises InputError if the newest copy there is another run's, and that of no stage of this one.

    `identities` are those of this run's stages; nothing is compared without any.
    """
    if not identities:
        return
    for name in reversed(to.whole()):
        manifest = to.manifest(name)
        if manifest is None:
            continue
        try:
            check_facts(f"{to.address}/{name}", manifest)
        except BrokenCheckpoint:
            continue
        begin = manifest["stage_begin"]
        own = next((each for each in identities if each.begin == begin), identities[-1])
        if changes := own.changes(manifest):
            raise InputError(f"{to.address} has copies of another run: {'; '.join(changes)}")
        return
