"""Opens what keeps a run's newest steps in memory, and says what it does, in the log and in result.json."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainer.checkpoint.memory_keeper import SHARE, Cadence, MemoryKeeper
from trainer.checkpoint.memory_restore import NodeMemory
from trainer.checkpoint.memory_state import bytes_kept
from trainer.checkpoint.resume import StartPoint
from trainer.checkpoint.state import TrainState
from trainer.comm.protocol import Comm
from trainer.sysinfo.shortage import memory_for_state
from trainer.world.state_folder import MEMORY, STATE_DIR
from trainer.world.state_parts import BUFFERS

log = logging.getLogger("clipship")


def keeper_of(
    memory: NodeMemory | None,
    start: StartPoint,
    train: TrainState,
    comm: Comm,
    every: int | None = None,
    run: Mapping[str, Any] | None = None,
) -> MemoryKeeper | None:
    """Returns the keeper of this rank's part of each step; None if the job keeps nothing in memory.

    `every` is the job's `recovery.keep_every_steps`; `run` says what the run is, the same on every rank.
    """
    if memory is None:
        return None
    if memory.folder is None:
        _warn(comm, f"there is no folder for it in {MEMORY}, or no supervisor to make one")
    from_memory = start.memory
    return MemoryKeeper(
        memory.folder,
        memory.start,
        train,
        memory.part,
        memory.parts,
        first_buffer=from_memory.first_buffer if from_memory else 0,
        every=every or (from_memory.every if from_memory else None),
        run=run,
        failed=lambda reason: _warn(comm, reason),
        chosen=_say_chosen,
    )


def check_memory(node: str, model: nn.Module, beside: int) -> None:
    """Raises MachineError if this node has too little memory for the steps; `beside` bytes are for others.

    A rank without a folder keeps nothing, and is not checked.
    """
    if folder := os.environ.get(STATE_DIR):
        trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        size = sum(tensor.nbytes for tensor in model.state_dict().values()) + 2 * trained
        memory_for_state(node, BUFFERS * size, bytes_kept(Path(folder)), beside)


def summary_of(keeper: MemoryKeeper | None) -> Mapping[str, object]:
    """Returns what result.json says about the steps in memory; nothing if none are kept."""
    if keeper is None:
        return {}
    share = keeper.cadence.share
    about = {"every_steps": keeper.cadence.every, "bytes_per_node": BUFFERS * keeper.bytes}
    return {"in_memory": {**about, **({} if share is None else {"cost_of_each_step": round(share, 4)})}}


def _say_chosen(cadence: Cadence) -> None:
    which = "each step is" if cadence.every == 1 else f"one step in {cadence.every} is"
    log.info(
        "%-12s %s kept: one costs %.1f %% of a step and is complete after %.1f (at most %.0f %% of the time "
        "may go)",
        "in memory",
        which,
        100 * (cadence.share or 0.0),
        cadence.beside,
        100 * SHARE,
    )


def _warn(comm: Comm, reason: str) -> None:
    log.warning(
        "%-12s rank %d on %s keeps NO steps: %s. The run goes on; a restart may begin at a checkpoint.",
        "in memory",
        comm.world.rank,
        comm.world.node,
        reason,
    )
