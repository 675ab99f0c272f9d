"""Record of how `clipship run` was asked to start a run the last time, so that it can be asked again.

A rank writes the run's job.toml and environment.json only once all ranks are connected; a start that ends
before leaves this record. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.run.layout import START_FILE
from trainer.safe_io.atomic import json_text, write_whole
from trainer.safe_io.plain import read_json

CLIPSHIP_RUN = "clipship run"
_LAUNCHERS = frozenset({CLIPSHIP_RUN, "Open MPI", "horovodrun"})
"""Launchers that `clipship run` starts, as ranks call them."""


@dataclass(frozen=True)
class StartRecord:
    """Arguments of `clipship run`: the job file, its changes, and the ranks here or on hosts."""

    job: str
    """Name of the start's job in the run folder's artefacts."""
    ranks: int
    """Number of ranks on this machine; 0 if `hosts` has them."""
    hosts: str = ""
    """Hosts with their ranks as `--hosts` takes them; empty if the ranks are on this machine."""


def write_start(folder: Path, start: StartRecord) -> None:
    """Write the record into the run folder, which is made if it is missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / START_FILE, json_text(asdict(start), indent=2) + "\n", private=True)


def read_start(folder: Path) -> StartRecord | None:
    """Returns the record of the run's last start by `clipship run`; None if there is none that is whole."""
    try:
        start = StartRecord(**read_json(folder / START_FILE))
    except (OSError, ValueError, TypeError):
        return None
    texts = isinstance(start.job, str) and isinstance(start.hosts, str)
    return start if texts and isinstance(start.ranks, int) else None


def ranks_before(folder: Path, environment: Sequence[Mapping[str, str]]) -> tuple[int, str]:
    """Returns the ranks on this machine and the hosts of the run's last start; one of the two is empty.

    `environment` has the ranks of the last start that came so far. Returns (0, "") if nothing says it, or if
    another launcher than `clipship run` had ranks on several nodes.
    """
    start = read_start(folder)
    launchers = {rank.get("launcher", "") for rank in environment}
    if start is not None and launchers <= _LAUNCHERS:
        return start.ranks, start.hosts
    one_node = len({rank.get("node") for rank in environment}) == 1
    return (len(environment) if one_node and launchers <= {*_LAUNCHERS, "torchrun"} else 0), ""
