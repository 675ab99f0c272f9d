"""Why a rank left: one small file for each, since launchers lose exit codes (torchrun turns every one into 1). No torch.

A rank that fails writes its record into its supervisor's folder, and the first cause of the run's end goes into the fresh folder that
`clipship run` names in `CLIPSHIP_EXIT_DIR`. A rank without a supervisor writes there itself.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import EXIT_PREEMPTED
from trainer.health.pulse import RANK_DIR
from trainer.whole_file import write_json

EXIT_DIR = "CLIPSHIP_EXIT_DIR"
_RECORD = "rank-{:05d}.json"


@dataclass(frozen=True)
class ExitRecord:
    """A rank's last words; `time` in seconds since the epoch, on the clock of its node."""

    rank: int
    node: str
    exit_code: int
    reason: str
    time: float
    details: str = ""
    """More lines for people: a traceback, or what every late rank was doing."""
    start: str = ""
    """In exit.json: which start of the run ended so, as `Meeting.start` names it."""

    def headline(self) -> str:
        """One line."""
        if self.exit_code == EXIT_PREEMPTED:  # every rank's end, no rank's fault
            return f"clipship: {self.reason} (exit code {self.exit_code})"
        return f"clipship: rank {self.rank} on {self.node} ended the run with exit code {self.exit_code}: {self.reason}"

    def text(self) -> str:
        """The headline and the details."""
        return "\n".join([self.headline(), *self.details.splitlines()])


def record_exit(record: ExitRecord, env: Mapping[str, str]) -> bool:
    """Leave the record for the supervisor, or for who started the ranks; False where nobody waits for it (no launcher of ours)."""
    return _write(record, env.get(RANK_DIR)) if RANK_DIR in env else record_cause(record, env)


def record_cause(record: ExitRecord, env: Mapping[str, str]) -> bool:
    """Leave the record for who started the ranks; False where it does not wait on this host."""
    return _write(record, env.get(EXIT_DIR))


def first_cause(folder: Path) -> ExitRecord | None:
    """The earliest failure recorded in the folder, or None: the others mostly fail because of it."""
    records = [ExitRecord(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank-*.json")]
    return min((record for record in records if record.exit_code), key=lambda record: record.time, default=None)


def _write(record: ExitRecord, folder: str | None) -> bool:
    if not folder or not Path(folder).is_dir():
        return False
    write_json(Path(folder, _RECORD.format(record.rank)), asdict(record))
    return True
