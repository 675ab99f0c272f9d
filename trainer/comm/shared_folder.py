"""Checks that every rank sees a folder that rank 0 writes."""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.comm.rank_zero import of_rank_0
from trainer.errors import InputError
from trainer.run.folder import not_written
from trainer.run.start_job import appears

if TYPE_CHECKING:  # protocol imports torch, which readers of run folders do not need
    from trainer.comm.protocol import Comm


def check_future_folder(folder: Path, comm: "Comm") -> None:
    """Checks that a run folder could be made there and that all ranks would see it; leaves nothing behind.

    Collective. Raises InputError on every rank.
    """
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    check_shared(Path(comm.broadcast_object(str(there))), comm)


def check_shared(folder: Path, comm: "Comm") -> None:
    """Checks that rank 0 can write in the folder and that every rank sees it. Collective.

    Raises InputError, which names the nodes that do not see it.
    """
    # The name is new each time, since network file systems remember which names were missing.
    marker = folder / f".seen-by-all-{comm.broadcast_object(secrets.token_hex(8))}"

    def touch() -> None:
        try:
            marker.touch()
        except OSError as error:
            raise InputError(not_written(folder, error)) from None

    of_rank_0(comm, touch)
    node = comm.broadcast_object(comm.world.node)
    missing_on = sorted(
        {node for node, sees in comm.all_gather_object((comm.world.node, appears(marker))) if not sees}
    )
    if comm.world.rank == 0:
        marker.unlink()
    if missing_on:
        raise InputError(
            f"the run folder {folder} of {node} does not exist on {', '.join(missing_on)}: "
            "put it on a file system that all nodes share, with --set logging.runs=FOLDER"
        )
