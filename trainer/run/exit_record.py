"""Exit records: one small file for each rank that fails.

Launchers lose exit codes: torchrun turns each into 1. A failing rank writes its record into its supervisor's
folder. The first cause of the run's end goes into the fresh folder that `clipship run` names in
`CLIPSHIP_EXIT_DIR`. A rank without a supervisor writes there itself. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_PREEMPTED
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import read_json
from trainer.text.terminal import say

EXIT_DIR = "CLIPSHIP_EXIT_DIR"
RANK_DIR = "CLIPSHIP_RANK_DIR"
"""Variable with the folder in which a supervisor and its rank exchange files; unset for a rank without a
supervisor."""
STOPPED_THEN = "asked to stop; then"
"""Begin of the reason of a run that lost a supervisor after a request to stop, before all was saved."""
SUPERVISOR_LOST = "its supervisor is gone"
"""Beginning of the reason of a run that lost one; batch scripts then ask whether its node is lost."""
_RECORD = "rank-{:05d}.json"


@dataclass(frozen=True)
class ExitRecord:
    """Record of why a rank ended; `time` is in seconds since the epoch, on its node's clock."""

    rank: int
    node: str
    exit_code: int
    reason: str
    time: float
    details: str = ""
    """More lines for people: a traceback, or what every late rank was doing."""
    start: str = ""
    """Start of the run that ended so, as `Rendezvous.start` names it; set in exit.json only."""
    restarts: Sequence[Mapping[str, Any]] = ()
    """Restarts of the ranks before this end, as `Restart.to_json` gives them; set in exit.json only."""
    generation: int = 0
    """Generation of the ranks that ended so; 0 where only the coordinator knows it, which fills it in."""
    left_out: Sequence[str] = ()
    """Nodes that failed twice or did badly, without which a later start goes on; set in exit.json only."""
    unfit: str = ""
    """Node that all ranks found unfit to train; "" if none. The reason is about that node, not this rank."""
    shown: bool = False
    """True if a supervisor has shown the headline; set in the launcher's folder only."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "restarts", tuple(self.restarts))  # JSON has lists
        object.__setattr__(self, "left_out", tuple(self.left_out))

    def headline(self) -> str:
        """Returns the record as one line for people."""
        if self.exit_code == EXIT_PREEMPTED:  # it ends every rank, and no rank is at fault
            return f"clipship: {self.reason} (exit code {self.exit_code})"
        who = rank_name(self.rank, self.node, self.generation)
        comma = "," if self.generation > 1 else ""
        return f"clipship: {who}{comma} ended the run with exit code {self.exit_code}: {self.reason}"

    def text(self) -> str:
        """Returns the headline followed by the details."""
        return "\n".join([self.headline(), *self.details.splitlines()])


def rank_name(rank: object, node: object, generation: object = 1) -> str:
    """Returns how messages name a rank: `rank 3 on b`, or `rank 3 on b, generation 2` after a restart.

    A node may be unknown, "". The values may be whatever a file of the run has.
    """
    began_again = str(generation) not in ("0", "1")
    return (
        f"rank {rank}"
        + (f" on {node}" if node else "")
        + (f", generation {generation}" if began_again else "")
    )


def supervisor_lost(how: str) -> str:
    """Returns the reason of a run that lost a supervisor; `how` says how the others noticed."""
    return f"{SUPERVISOR_LOST}: {how}; its node failed, or the process was killed"


def record_exit(record: ExitRecord, env: Mapping[str, str]) -> bool:
    """Write the record for the supervisor, or without one for the launcher.

    Returns False if neither waits for it, as the rank was not started by Clipship's launcher, or if it cannot
    be written, which it says.
    """
    return _write(record, env.get(RANK_DIR)) if RANK_DIR in env else record_cause(record, env)


def record_cause(record: ExitRecord, env: Mapping[str, str]) -> bool:
    """Write the record for the launcher that started the ranks.

    Returns False if no launcher waits on this host, or if it cannot be written, which it says.
    """
    return _write(record, env.get(EXIT_DIR))


def first_cause(folder: Path) -> ExitRecord | None:
    """Returns the earliest failure recorded in the folder, None if there is none.

    Later failures mostly follow from it.
    """
    return min(
        (record for record in _records(folder) if record.exit_code),
        key=lambda record: record.time,
        default=None,
    )


def is_shown(folder: Path, cause: ExitRecord) -> bool:
    """Returns whether a record in the folder says that a supervisor has shown this cause."""
    ends = (cause.rank, cause.exit_code, cause.reason)
    return any(each.shown and (each.rank, each.exit_code, each.reason) == ends for each in _records(folder))


def _records(folder: Path) -> list[ExitRecord]:
    return [ExitRecord(**read_json(path)) for path in folder.glob("rank-*.json")]


def _write(record: ExitRecord, folder: str | None) -> bool:
    if not folder or not Path(folder).is_dir():
        return False
    try:
        write_json(Path(folder, _RECORD.format(record.rank)), asdict(record))
    except OSError as error:  # a full /dev/shm must not change the exit code
        say(f"why {rank_name(record.rank, record.node)} ends cannot be recorded: {error}")
        return False
    return True
