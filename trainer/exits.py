"""Why a rank left: one small file for each rank that failed, since launchers lose exit codes (torchrun turns every one into 1). No torch.

What starts the ranks names a fresh folder in `CLIPSHIP_EXIT_DIR`; a rank that fails writes its record there before it leaves.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

EXIT_DIR = "CLIPSHIP_EXIT_DIR"


@dataclass(frozen=True)
class ExitRecord:
    """A rank's last words; `time` in seconds since the epoch, on the clock of its node."""

    rank: int
    node: str
    exit_code: int
    reason: str
    time: float


def record_exit(record: ExitRecord, env: Mapping[str, str]) -> None:
    """Leave the record for whoever started the ranks; does nothing where no folder waits for it (another host, or no launcher of ours)."""
    folder = env.get(EXIT_DIR)
    if not folder or not Path(folder).is_dir():
        return
    path = Path(folder, f"rank-{record.rank:05d}.json")
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(asdict(record)), encoding="utf-8")
    os.replace(beside, path)


def first_cause(folder: Path) -> ExitRecord | None:
    """The earliest failure that a rank recorded, or None: the others mostly fail because of it."""
    records = [ExitRecord(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank-*.json")]
    return min((record for record in records if record.exit_code), key=lambda record: record.time, default=None)
