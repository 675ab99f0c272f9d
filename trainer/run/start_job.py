"""The job of one start: resolved once by who starts the ranks, and the only one that the start reads.

An edit of the user's file, its removal or another working folder changes nothing for a start: ranks,
supervisors, restarts and `clipship resume` read this file. Each start has its own, so that one that is
refused because another still runs takes nothing from it. How `clipship run` was asked to start a run the last
time is recorded, too, so that it can be asked again: a rank writes the run's job.toml and environment.json
only once all ranks are connected. Imports no torch.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import InputError
from trainer.run.layout import ARTEFACTS, JOB_FILE, START_FILE
from trainer.run.lock import who_holds
from trainer.run.retry import shown
from trainer.safe_io.atomic import json_text, write_whole
from trainer.safe_io.plain import read_as

if TYPE_CHECKING:
    from trainer.config import Job

APPEARS_S = 5.0
"""Longest that a network file system may take to show another node a new file."""
_PATTERN = "start-*.toml"
_LEFT_BEHIND_S = 30 * 86400.0
"""Age of a start's job that its launcher, which was killed, has left behind: no start lasts longer."""


def new_start_job(folder: Path) -> Path:
    """Returns the path, in the run folder's artefacts, of the job of a start that begins now."""
    return folder / ARTEFACTS / _PATTERN.replace("*", secrets.token_hex(4))


def write_start_job(path: Path, job: "Job") -> None:
    """Writes the resolved job for its owner alone: it holds the values of [env]. Raises OSError."""
    from trainer.config.loader import dump_job  # with all sections, which readers of a run do not need

    write_whole(path, dump_job(job), private=True)


def remove_start_jobs(folder: Path, own: Path) -> None:
    """Removes a start's own job, now that it is over, and those of starts that were killed long ago.

    Another start's younger job stays: nobody holds the folder before its ranks have met, nor between two
    generations of them. `own` stays, too, if the start ended before a rank wrote it as the run's own job
    file: `newest_job` finds it. Raises OSError.
    """
    held = who_holds(folder) is not None
    if held or newest_job(folder, own) != own:
        own.unlink(missing_ok=True)
    if not held:
        for path in (folder / ARTEFACTS).glob(_PATTERN):
            if path != own and path.stat().st_mtime < time.time() - _LEFT_BEHIND_S:
                path.unlink()


def newest_job(folder: Path, of_start: Path | None) -> Path | None:
    """Returns the job that was asked for last: the run's own, or that of a start which no rank took over.

    None if there is neither.
    """
    written = [path for path in (folder / JOB_FILE, of_start) if path is not None and path.is_file()]
    return max(written, key=lambda path: path.stat().st_mtime, default=None)


def check_seen(path: Path, node: str = "") -> None:
    """Raises InputError if a rank does not see its job file.

    A start's job gets the time that a file system needs to show it. `node` is that of the rank in a world of
    several, where others may see the file.
    """
    of_start = path.match(f"{ARTEFACTS}/{_PATTERN}")
    if appears(path) if of_start else path.exists():
        return
    if node:
        raise InputError(
            f"node {node} does not see {path}: the job file, which a start has in its run folder "
            "(logging.runs), must be on a file system that all nodes share"
        )
    if of_start:
        raise InputError(
            f"{path} is gone: either the run folder was renamed or removed under its run (give it its name "
            "again, and `clipship resume` goes on), or this machine does not see it (logging.runs must be on "
            "a file system that all nodes share)"
        )


def appears(path: Path) -> bool:
    """Returns whether the file appears in time."""
    return shown(path.exists, path.parent, APPEARS_S)


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
    start = read_as(StartRecord, folder / START_FILE)
    if start is None or not (isinstance(start.job, str) and isinstance(start.hosts, str)):
        return None
    return start if isinstance(start.ranks, int) else None


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
