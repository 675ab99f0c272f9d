"""Output of a job of Slurm: the lines of its ranks, or of its batch script. Imports no torch."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import ClusterError, InputError
from trainer.launch import logfiles
from trainer.launch.slurm.submit import ENDED_STATES, call, cluster_options, queued
from trainer.launch.submission import Submission
from trainer.run.layout import ARTEFACTS, LOGS, SUBMISSION_FILE

_POLL_S = 5.0
"""Seconds between two questions whether a job still runs; fewer questions spare Slurm's controller."""
_SILENCE_LIMIT_S = 600.0
"""Seconds of silence after which a controller that has answered before counts as gone: it may be busy or
restarting."""


def log_lines(folder: Path, submission: Submission, rank: int | None, follow: bool) -> Iterator[str] | None:
    """Returns the lines to show; None if the ranks' own log files have everything.

    Before there are log files, the batch script's output tells the reason.
    """
    if follow:
        return _followed(folder, submission, rank)
    return None if rank is not None or logfiles.has_logs(folder) else _script_output(folder, submission)


def _followed(folder: Path, submission: Submission, rank: int | None) -> Iterator[str]:
    """Yields the ranks' lines until Slurm has ended the job; the script's output if no rank wrote any."""
    last_question, last_answer, over = -math.inf, -math.inf, False

    def is_over() -> bool:
        nonlocal last_question, last_answer, over
        now = time.monotonic()
        if not over and now - last_question > _POLL_S:
            last_question = now
            try:
                over, last_answer = all(row["state"] in ENDED_STATES for row in queued(submission)), now
            except ClusterError:
                if now - last_answer > _SILENCE_LIMIT_S:
                    raise
        return over

    yield from logfiles.log_lines(folder, rank, follow=True, over=is_over)
    if not logfiles.has_logs(folder):
        yield from _script_output(folder, submission) or ()


def _script_output(folder: Path, submission: Submission) -> Iterator[str] | None:
    output = Path(submission.details.get("output") or folder / LOGS / f"slurm-{submission.id}.out")
    if not output.exists():  # the job was submitted by hand, from elsewhere
        shown = call("scontrol", "show", "job", *cluster_options(submission), submission.id).stdout
        output = Path(next(iter(re.findall(r"^ *StdOut=(.+)$", shown, re.MULTILINE)), output))
    if not output.exists():
        return None
    if _owner(output) != _owner(folder / ARTEFACTS / SUBMISSION_FILE):
        raise InputError(f"{output} is not shown: it belongs to another user than the run in {folder}")
    return (f"[slurm] {line}" for line in logfiles.plain_lines(output))


def _owner(path: Path) -> int:
    return path.stat().st_uid
