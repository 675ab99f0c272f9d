"""A scheduler in a hundred lines: `[nohup]` runs a job's script in the background of this machine.

`python -m tests.support.toy_scheduler ...` is the command `clipship` with two more rows in the tables of
schedulers. The second, `[faraway]`, is the same, but its ranks see other files than this machine.
"""

import datetime
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tests.support.ready import ready
from trainer.config.schedulers import SCHEDULERS, SchedulerRow
from trainer.config.sections import SECTIONS
from trainer.config.types import SchedulerSection
from trainer.errors import InputError
from trainer.launch.schedulers import IMPLEMENTATIONS
from trainer.launch.submission import Scheduler, Submission


class Nohup(SchedulerSection):
    """Keys of `[nohup]`."""

    nice: Annotated[int, Field(ge=0, le=19)] = 0
    """Niceness of the ranks."""

    @property
    def uses_image(self) -> bool:
        """Never: the script runs as it is."""
        return False


class NohupScheduler(Scheduler):
    """Scripts of bash in sessions of their own."""

    name = "nohup"

    def render(self, job: Any) -> str:
        """Bash script that says its job's name and waits."""
        log = shlex.quote(f"{job.logging.runs}/{job.name}/logs/rank-00000.log")
        begin = f"renice -n {job.nohup.nice} $$ >/dev/null\necho {shlex.quote(job.name)} goes on >>{log}\n"
        return f"{begin}exec sleep 600\n"

    def starter(self, job: Any) -> str:
        """Always bash."""
        return "bash"

    def validate(self, job: Any) -> None:
        """Raises InputError for more than this one node."""
        if job.resources.nodes > 1:
            raise InputError(f"resources.nodes = {job.resources.nodes}: nohup has this node alone")

    def submit(self, job: Any, folder: Path) -> Submission:
        """Start the script in a session of its own; its process id is the submission's."""
        (folder / "logs").mkdir(exist_ok=True)
        script = folder / "artefacts" / "job.sh"
        script.write_text(self.render(job))
        process = subprocess.Popen(
            ["bash", script], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return Submission(self.name, str(process.pid), now)

    def adopt(self, job: Any, folder: Path | None) -> None:
        """Nobody starts such a script by hand."""

    def status(self, folder: Path, submission: Submission) -> list[tuple[str, str]]:
        """Running or over, by the process's entry in /proc."""
        return [("state", "running" if _lives(submission) else "over")]

    def outcome(self, folder: Path, submission: Submission) -> Any:
        """Such a script never does well: it is ended."""
        return "running" if _lives(submission) else "ended"

    def cancel(self, folder: Path, submission: Submission) -> str:
        """Send SIGTERM to the script's session."""
        with suppress(ProcessLookupError):
            os.killpg(int(submission.id), signal.SIGTERM)
        return f"process {submission.id} was asked to end"

    def log_lines(
        self, folder: Path, submission: Submission, rank: int | None, follow: bool
    ) -> Iterator[str] | None:
        """None: the run folder has the log files."""


class FarScheduler(NohupScheduler):
    """The same, for ranks that see other files than this machine."""

    name = "faraway"
    same_files = False

    def record_folder(self, job: Any) -> Path:
        """Folder for the record of a run whose own folder is far away."""
        return Path("records", job.name)


def _lives(submission: Submission) -> bool:
    try:
        return ") Z " not in Path("/proc", submission.id, "stat").read_text()
    except OSError:
        return False


def clipship(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command line with these schedulers, in the folder."""
    program = f"import sys; from {_HERE} import with_schedulers; sys.exit(with_schedulers(sys.argv[1:]))"
    return ready(_HERE, "trainer.cli.main", "trainer.config").run(program, *words, folder=folder)


def with_schedulers(words: list[str]) -> int:
    """The command line with these schedulers; returns its exit code."""
    for made in (NohupScheduler, FarScheduler):
        SCHEDULERS[made.name] = SchedulerRow(made.name, "The script for bash.")
        SECTIONS[made.name] = Nohup
        IMPLEMENTATIONS[made.name] = made
    from trainer.cli.main import main

    return main(words)


_HERE = "tests.support.toy_scheduler"

if __name__ == "__main__":
    sys.exit(with_schedulers(sys.argv[1:]))
