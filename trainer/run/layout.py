"""Names of the run folder's files and folders; each is spelled only here.

Every run folder has the same layout: the job, what the run reported, and its results. Imports nothing of the
package but errors and safe_io.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import InputError
from trainer.safe_io.plain import read_json

JOB_FILE = "job.toml"
"""The resolved job, which is enough to start the run again."""
ARTEFACTS = "artefacts"
"""Folder with what was rendered and submitted. It exists before a submitted run begins."""
SUBMISSION_FILE = "submission.json"
"""File in ARTEFACTS that says where the run was submitted, and its id there."""
SUBMISSION_ID_FILE = "submission.env"
"""File in ARTEFACTS with the submission's id in a line that a batch script reads."""
BEGUN_BY_FILE = "begun-by"
"""File in ARTEFACTS with the id of the submission that began the run with checkpoint.resume = "never"."""
EXIT_BEFORE_FILE = "exit-before.json"
"""File in ARTEFACTS that says how the start before a new submission ended."""
LAUNCHER_FILE = "launcher.env"
"""File in ARTEFACTS with what the run tells whoever has started it; see `trainer.run.launcher_word`."""
STARTS_FILE = "starts.env"
"""File in ARTEFACTS with the starts that a launcher pod or a batch script has counted."""
PODS = "pods"
"""Folder in ARTEFACTS with the starts of a Job's pods, which meet there."""
LOGS = "logs"
METRICS_FILE = "metrics.jsonl"
RANK_STATS_FILE = "ranks.jsonl"
GOODPUT_FILE = "goodput.jsonl"
"""Times of every start and generation of the run; only added to."""
ENVIRONMENT_FILE = "environment.json"
PREFLIGHT_FILE = "preflight.json"
CHECKPOINTS = "checkpoints"
CHECKPOINT_REQUEST = "checkpoint.request"
"""File that `clipship checkpoint RUN` makes; rank 0 removes it and saves a checkpoint."""
COPIES_FILE = "copies.json"
"""Last step that is copied and what is not, where `checkpoint.copy_to` is set."""
COPY_FILE = "copy.json"
"""File of a copy of a run that says of which run: nobody goes on in such a folder itself."""
RESULT_FILE = "result.json"
"""Results of a run that is done; written last."""
EXIT_FILE = "exit.json"
"""Record of how the last start ended."""
DIAGNOSIS_FILE = "diagnosis.json"
RESTARTS_FILE = "restarts.json"
"""Restarts of the ranks within the last start, each with its cause; missing if there was none."""
GENERATIONS = "generations"
"""Folder with a file for each generation of the last start, from the second on: who coordinates it."""
FLIGHT_RECORDS = "flight-records"
NON_FINITE = "non-finite"
"""Folder with the samples of each step whose gradient was not finite: one file for each rank and step."""
INDEX = "index"
"""Folder with the index of shards whose own folder is not writable. It is made before the run."""
TRACES = "traces"
TENSORBOARD = "tensorboard"
WANDB = "wandb"
WANDB_ID_FILE = "wandb-id"
SWANLAB = "swanlab"
SWANLAB_ID_FILE = "swanlab-id"
MLFLOW_ID_FILE = "mlflow-run"
SERVICE_ID_FILES = (WANDB_ID_FILE, SWANLAB_ID_FILE, MLFLOW_ID_FILE)
"""Files with the ids that the run has at services."""
EVALUATIONS = "evaluations"
"""Folder with the results of `clipship eval --suite`: one file for each suite and checkpoint."""
REPORT_FILE = "report.html"
SWEEP_FILE = "sweep.json"
"""File in the folder of a sweep, which is beside those of its runs: the runs with their values."""
SWEEP_REPORT_FILE = "sweep.html"
LOCK = ".lock"
START_FILE = ".start.json"
"""Record of how `clipship run` was asked to start the run; see `trainer.run.start_job`."""

LEFT_BEFORE = frozenset(
    {
        ARTEFACTS,
        INDEX,
        LOCK,
        LOGS,
        EXIT_FILE,
        DIAGNOSIS_FILE,
        RESTARTS_FILE,
        GENERATIONS,
        FLIGHT_RECORDS,
        GOODPUT_FILE,
        COPIES_FILE,
    }
)
"""Names that a folder without a run may hold: a start that ends before it becomes a run leaves them."""

_RANK_LOG = re.compile(r"rank-(\d{5,})\.log")


def generation_file(generation: int) -> str:
    """Returns the name of a generation's file in GENERATIONS."""
    return f"{generation:05d}.json"


def rank_log(rank: int) -> str:
    """Returns the name of a rank's log file in LOGS."""
    return f"rank-{rank:05d}.log"


def rank_logs(folder: Path) -> list[tuple[int, Path]]:
    """Returns the ranks that have a log file in the run folder, in order, each with its file."""
    matches = ((_RANK_LOG.fullmatch(path.name), path) for path in (folder / LOGS).glob("rank-*.log"))
    return sorted((int(match[1]), path) for match, path in matches if match)


@dataclass(frozen=True)
class Run:
    """Paths in one run folder."""

    folder: Path

    @property
    def job(self) -> Path:
        return self.folder / JOB_FILE

    @property
    def logs(self) -> Path:
        return self.folder / LOGS

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS_FILE

    @property
    def result(self) -> Path:
        return self.folder / RESULT_FILE

    @property
    def environment(self) -> Path:
        return self.folder / ENVIRONMENT_FILE

    @property
    def preflight(self) -> Path:
        return self.folder / PREFLIGHT_FILE

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def finished(self) -> bool:
        """Returns whether result.json says that the run is done. Raises InputError if it cannot be read."""
        return self._result().get("reason") == "done"

    def finished_as_asked(self, resume: str, steps: int) -> bool:
        """Returns whether the run is done, has at least that many steps, and `resume` does not restart it.

        `resume` is the job's `checkpoint.resume`. A path restarts a finished run, unless the start that
        finished it was given the same path.
        """
        result = self._result()
        if result.get("reason") != "done":
            return False
        before = result.get("steps")
        enough = not isinstance(before, int) or before >= steps
        return enough and resume in ("auto", "never", result.get("resume"))

    def _result(self) -> dict[str, Any]:
        """Returns what result.json holds; empty if there is none."""
        if not os.path.lexists(self.result):
            return {}
        try:
            result: dict[str, Any] = read_json(self.result)
            return result
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{self.result} cannot be read ({problem}), so nobody knows whether this run is done: remove "
            "that file to go on with the run, or move the folder aside (`clipship run --fresh` does)"
        )
