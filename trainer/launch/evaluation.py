"""Starts ranks that use a trained model and belong to no run. Imports no torch.

Their job and their result lie in a temporary folder.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.config.loader import dump_job
from trainer.errors import EXIT_DONE, InputError
from trainer.launch.hosts import Host
from trainer.launch.local import start_ranks
from trainer.launch.processes import stdout_is_stderr
from trainer.run.layout import JOB_FILE, RESULT_FILE
from trainer.safe_io.plain import read_json


def evaluated(
    job: Job, work: str, *words: str, nproc: int | None, hosts: Sequence[Host] | None = None
) -> tuple[int, dict[str, Any]]:
    """Lets ranks do a work of `trainer.evaluate.rank`; returns the exit code, and the result if it is 0.

    The temporary folder is made in the working folder if there are hosts, which must see it.
    """
    with _folder(None if hosts is None else Path.cwd()) as folder:
        job_path, result_path = folder / JOB_FILE, folder / RESULT_FILE
        # the supervisors' files go into the temporary folder: they belong to no run
        kept_here = job.logging.model_copy(update={"runs": str(folder)})
        job_path.write_text(dump_job(job.model_copy(update={"logging": kept_here})), encoding="utf-8")
        rank = (sys.executable, "-P", "-m", "trainer.evaluate", str(job_path), str(result_path), work, *words)
        with stdout_is_stderr():
            code = start_ranks(rank, job, nproc=nproc, hosts=hosts)
        return code, read_json(result_path) if code == EXIT_DONE else {}


@contextmanager
def _folder(within: Path | None) -> Iterator[Path]:
    """Yields a temporary folder.

    It is removed at the end, unless it holds a diagnosis, which the last lines of output name.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="clipship-eval-", dir=within))
    except OSError as problem:
        raise InputError(f"{within or 'TMPDIR'}: no folder can be made there: {problem.strerror}") from None
    try:
        yield folder
    finally:
        if not list(folder.glob("*/diagnosis.json")):
            shutil.rmtree(folder, ignore_errors=True)
