"""What `clipship check` says of a job."""

import io
import json
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from trainer.cli.main import main
from trainer.config import Job
from trainer.config.loader import dump_job


def check(job: Job | Path, *words: str) -> tuple[int, str, str]:
    """The exit code of the command, and what it prints on stdout and stderr."""
    with tempfile.TemporaryDirectory(prefix="clipship-check-") as folder:
        path = job if isinstance(job, Path) else Path(folder, "job.toml")
        if isinstance(job, Job):
            path.write_text(dump_job(job))
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main(["check", str(path), *words])
    return code, out.getvalue(), err.getvalue()


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
