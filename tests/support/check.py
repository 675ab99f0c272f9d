"""What `clipship check` says of a job."""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.command_line import Said, clipship
from trainer.config import Job
from trainer.config.loader import dump_job


def check(job: Job | Path, *words: str) -> Said:
    """What the command says of a job, or of a job file."""
    with tempfile.TemporaryDirectory(prefix="clipship-check-") as folder:
        path = job if isinstance(job, Path) else Path(folder, "job.toml")
        if isinstance(job, Job):
            path.write_text(dump_job(job))
        return clipship("check", path, *words)


def problems(job: Job | Path, *words: str) -> str:
    """The problems of a job; "" if there are none."""
    code, _, said = check(job, *words)
    assert code == (2 if said else 0), said
    return said


def found(job: Job | Path, *words: str) -> Any:
    """What `check --json` says of a job without problems."""
    code, said, _ = check(job, *words, "--json")
    assert code == 0, said
    return json.loads(said)
