"""Condemned nodes: rank 0 tells its supervisor of nodes that hold up the run, in a file of their folder.

The coordinator leaves such a node out from the next restart on, if the others make a world that is as large.
Imports no torch.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainer.run.exit_record import RANK_DIR
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import read_json

_FILE = "condemned.json"


def condemn(node: str, why: str, env: Mapping[str, str]) -> None:
    """Tells this rank's supervisor to condemn a node; does nothing without a supervisor.

    `why` is the end of a sentence about the node. If the memory is full, the node is not condemned: that ends
    no run.
    """
    folder = env.get(RANK_DIR)
    with suppress(OSError):
        if folder and Path(folder).is_dir():
            write_json(Path(folder, _FILE), {**condemned(Path(folder)), node: why})


def condemned(folder: Path) -> dict[str, str]:
    """Returns the nodes that the rank of this folder has condemned, each with the reason."""
    try:
        nodes: dict[str, str] = read_json(folder / _FILE)
    except OSError:
        return {}
    return nodes
