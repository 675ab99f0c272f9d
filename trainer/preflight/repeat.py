"""Preflight of a restart: nodes that have passed in this start a short while ago are not measured again."""

import time
from pathlib import Path

from trainer.comm.protocol import Comm
from trainer.preflight import network_probe
from trainer.preflight.findings import error_of
from trainer.safe_io.plain import read_json
from trainer.text.wording import many

FRESH_S = 3600.0
"""Seconds for which the measurements of a node hold. A node may have degraded since then, and after so long
a time the seconds that new ones take are few.
"""


def has_passed(comm: Comm, figures: Path) -> bool:
    """Collective: returns whether earlier generations of this start have measured all nodes lately.

    `figures` is the file of the measurements in the run folder, which rank 0 reads.
    """
    if comm.world.generation == 1:
        return False
    nodes = set(comm.all_gather_object(comm.world.node))
    return bool(comm.broadcast_object(comm.world.rank == 0 and nodes <= _measured(figures)))


def check_again(comm: Comm) -> str:
    """Collective: runs each collective on known values, and returns a summary.

    Raises MachineError on all ranks alike if a value is wrong; UnfitNode if only one node of several is.
    """
    started = time.monotonic()
    gathered = comm.all_gather_object((comm.world.node, network_probe.wrong_collectives(comm)))
    nodes = {node for node, _ in gathered}
    problems = [
        (node, f"rank {rank} on {node}: {'; '.join(wrong)}")
        for rank, (node, wrong) in enumerate(gathered)
        if wrong
    ]
    if problems:
        text = f"collectives give wrong values: {'; '.join(problem for _, problem in problems)}"
        raise error_of(text, {node if len(nodes) > 1 else "" for node, _ in problems})
    seconds = time.monotonic() - started
    return f"the collectives again in {seconds:.1f} s; {many(len(nodes), 'node')} passed before"


def _measured(figures: Path) -> set[str]:
    """Returns the nodes that the file names and that were measured lately; none if it cannot be read."""
    try:
        rows = read_json(figures)["measurements"]
        return {row["node"] for row in rows if time.time() - float(row["clock_s"]) < FRESH_S}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
