"""Preflight of a restart: nodes that have passed in this start are not measured again."""

import json
import time
from pathlib import Path

from trainer.comm.protocol import Comm
from trainer.errors import MachineError
from trainer.preflight.network_probe import wrong_collectives
from trainer.text.wording import many


def has_passed(comm: Comm, figures: Path) -> bool:
    """Collective: returns whether an earlier generation of this start has measured all nodes of this one.

    `figures` is the file of its measurements in the run folder, which rank 0 reads.
    """
    if comm.world.generation == 1:
        return False
    nodes = set(comm.all_gather_object(comm.world.node))
    return bool(comm.broadcast_object(comm.world.rank == 0 and nodes <= _measured(figures)))


def check_again(comm: Comm) -> str:
    """Collective: runs each collective on known values, and returns a summary.

    Raises MachineError on all ranks alike if a value is wrong.
    """
    started = time.monotonic()
    gathered = comm.all_gather_object((comm.world.node, wrong_collectives(comm)))
    problems = [
        f"rank {rank} on {node}: {'; '.join(wrong)}" for rank, (node, wrong) in enumerate(gathered) if wrong
    ]
    if problems:
        raise MachineError(f"collectives give wrong values: {'; '.join(problems)}")
    nodes = many(len({node for node, _ in gathered}), "node")
    return f"the collectives again in {time.monotonic() - started:.1f} s; {nodes} passed before"


def _measured(figures: Path) -> set[str]:
    """Returns the nodes that the file names; none if it cannot be read."""
    try:
        return {own["node"] for own in json.loads(figures.read_text())["measurements"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
