"""MLflow. Its package (mlflow-skinny or mlflow) is imported when the writer is opened."""

import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.config.loader import own_keys
from trainer.config.tables import flat
from trainer.errors import InputError, Preempted
from trainer.run.layout import MLFLOW_ID_FILE
from trainer.safe_io.atomic import write_whole
from trainer.safe_io.plain import read_plain
from trainer.telemetry.figures import tagged
from trainer.telemetry.pictures import Picture, as_markdown, strip
from trainer.telemetry.services import WAIT_S, Outbox, waits, why
from trainer.text.masking import masked_values

log = logging.getLogger("clipship")

_PARAMETERS = 100
"""Parameters that a server of MLflow takes in one request."""
_LONGEST = 500
"""Characters of a parameter's value that every release of the server takes."""
_DENIED = (401, 403)
"""HTTP's codes for a user who is not known, or may not do this."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Seconds and repetitions of a request, where the environment says nothing: MLflow's own are 120 and 7, which
would be the start's wait for a server that is gone."""


class Mlflow:
    """Writes to one run of an MLflow server for all starts.

    Steps that come again after a kill are there twice, since MLflow keeps every point.
    """

    name = "MLflow"

    def __init__(self, job: Job, folder: Path) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._mlflow: Any = importlib.import_module("mlflow")
        self._client: Any = self._mlflow.MlflowClient(tracking_uri=job.logging.mlflow)
        self._has_pictures = False
        self._outbox = Outbox("MLflow", "metrics.jsonl has them")
        self._run = ""
        try:
            self._run = self._begin(job, folder / MLFLOW_ID_FILE)
        except self._mlflow.exceptions.MlflowException as error:
            if error.get_http_status_code() in _DENIED:
                raise InputError(
                    f"MLflow: {why(error)}; MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
                    "_PASSWORD, give a rank its keys; without MLflow, set logging.mlflow=off"
                ) from None
            log.warning("MLflow cannot be reached (%s): it gets nothing of this start", why(error))

    def write(self, values: Mapping[str, object]) -> None:
        at, step, entities = int(time.time() * 1000), values["step"], self._mlflow.entities
        metrics = [entities.Metric(name, value, at, step) for name, value in tagged(values).items()]
        self._send(lambda: self._client.log_batch(self._run, metrics=metrics))

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        if not self._has_pictures:  # each evaluation has the same ones
            from PIL import Image

            drawn = Image.fromarray(strip(pictures))
            self._send(lambda: self._client.log_image(self._run, drawn, "eval/pictures.png"))
            self._has_pictures = True
        text, file = as_markdown(pictures), f"eval/nearest_texts-{step:08d}.md"
        self._send(lambda: self._client.log_text(self._run, text, file))

    def close(self, error: BaseException | None) -> None:
        ended = "FINISHED" if error is None else "KILLED" if isinstance(error, Preempted) else "FAILED"
        self._send(lambda: self._client.set_terminated(self._run, ended))
        self._outbox.close(WAIT_S if waits(error) else 1.0)

    def _send(self, send: Any) -> None:
        if self._run:
            self._outbox.put(send)

    def _begin(self, job: Job, file: Path) -> str:
        """Returns the id of the run at the server, which an earlier start may have begun."""
        if file.exists():
            run = read_plain(file).strip()
            self._client.update_run(run, status="RUNNING")
            return run
        name = job.logging.mlflow_experiment
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=job.name).info.run_id
        write_whole(file, run + "\n")
        params = [self._mlflow.entities.Param(*each) for each in _parameters(job)]
        for first in range(0, len(params), _PARAMETERS):
            self._client.log_batch(run, params=params[first : first + _PARAMETERS])
        return str(run)


def _parameters(job: Job) -> Iterator[tuple[str, str]]:
    """Yields what the job's file sets, without [env] and secrets, by dotted names."""
    table = masked_values({name: section for name, section in own_keys(job).items() if name != "env"})
    for name, value in flat(table):
        yield name, str(value)[:_LONGEST]
