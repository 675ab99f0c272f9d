"""A scheduler in sixty lines: `[nohup]` runs a job's script in the background of this machine.

`python -m tests.support.toy_scheduler ...` is the command `clipship` with one more row in the table of
schedulers.
"""

import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from trainer.config.schedulers import SCHEDULERS, SchedulerRow
from trainer.config.types import SchedulerSection
from trainer.errors import InputError
from trainer.launch.submission import Submission
from trainer.launch.templates import sh
from trainer.run.layout import ARTEFACTS, JOB_FILE, LOGS, rank_log


class Nohup(SchedulerSection):
    """Keys of `[nohup]`."""

    nice: Annotated[int, Field(ge=0, le=19)] = 0
    """Niceness of the ranks."""

    @property
    def uses_image(self) -> bool:
        """Never: the script runs as it is."""
        return False


def render(job: Any) -> str:
    """Bash script that says its job's name and waits."""
    log = Path(job.logging.runs, job.name, LOGS, rank_log(0))
    return (
        f"renice -n {job.nohup.nice} $$ >/dev/null\necho {sh(job.name)} goes on >>{sh(log)}\nexec sleep 600\n"
    )


def starter(job: Any) -> str:
    """Always bash."""
    return "bash"


def validate(job: Any) -> None:
    """Raises InputError for more than this one node."""
    if job.resources.nodes > 1:
        raise InputError(f"resources.nodes = {job.resources.nodes}: nohup has this node alone")


def submit(job: Any, folder: Path) -> Submission:
    """Start the script in a session of its own; its process id is the submission's."""
    (folder / LOGS).mkdir()
    (folder / JOB_FILE).write_text(f'name = "{job.name}"\n')
    (folder / ARTEFACTS / "job.sh").write_text(render(job))
    process = subprocess.Popen(
        ["bash", folder / ARTEFACTS / "job.sh"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return Submission("nohup", str(process.pid), datetime.datetime.now(datetime.UTC).isoformat())


def adopt(job: Any, folder: Path | None) -> None:
    """Nobody starts such a script by hand."""


def status(folder: Path, submission: Submission) -> list[tuple[str, str]]:
    """Running or over, by the process's entry in /proc."""
    return [("state", "running" if Path("/proc", submission.id).exists() else "over")]


def cancel(folder: Path, submission: Submission) -> str:
    """Send SIGTERM to the script's session."""
    with suppress(ProcessLookupError):
        os.killpg(int(submission.id), signal.SIGTERM)
    return f"process {submission.id} was asked to end"


def log_lines(folder: Path, submission: Submission, rank: int | None, follow: bool) -> Iterator[str] | None:
    """None: the run folder has the log files."""


_HERE = "tests.support.toy_scheduler"
ROW = SchedulerRow(
    "nohup",
    f"{_HERE}:Nohup",
    f"{_HERE}:render",
    "The script for bash.",
    f"{_HERE}:validate",
    _HERE,
    f"{_HERE}:starter",
)

if __name__ == "__main__":
    SCHEDULERS[ROW.name] = ROW
    from trainer.cli.main import main

    sys.exit(main(sys.argv[1:]))
