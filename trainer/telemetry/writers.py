"""Table of metric writers besides metrics.jsonl: TensorBoard, and services that a job asks for; rank 0 only.

Each gets the numbers of metrics.jsonl under the same names, in groups, for each of which they show one panel.
Heavy packages (torch, those of services) are imported when a writer is opened.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from trainer.config import Job, Logging
from trainer.errors import InputError
from trainer.run.layout import TENSORBOARD
from trainer.telemetry.mlflow_writer import Mlflow
from trainer.telemetry.pictures import Picture
from trainer.telemetry.swanlab_writer import SwanLab
from trainer.telemetry.tensorboard_writer import TensorBoard, job_text
from trainer.telemetry.wandb_writer import Wandb


class MetricWriter(Protocol):
    """Protocol of a metric writer, which takes the same values as metrics.jsonl."""

    name: str
    """Name for people."""

    def write(self, values: Mapping[str, object]) -> None:
        """Writes one event, which has its `step`."""

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        """Shows pictures of the step's evaluation, at least one, with their nearest texts."""

    def close(self, error: BaseException | None) -> None:
        """Closes the writer; `error` is the exception that ended the run early, or None."""


@dataclass(frozen=True)
class Service:
    """Facts about a service that takes metrics."""

    name: str
    module: str
    package: str
    """Name of its package for pip, which brings the module."""
    writer: Callable[[Job, Path], MetricWriter]
    """Opens its writer in the run folder. Raises InputError if the service knows no such user."""


SERVICES = {
    "wandb": Service("W&B", "wandb", "wandb", Wandb),
    "swanlab": Service("SwanLab", "swanlab", "swanlab", SwanLab),
    "mlflow": Service("MLflow", "mlflow", "mlflow-skinny", Mlflow),
}
"""Services by the key of `[logging]` that asks for each, which is also the extra that brings its package."""


def check_installed(settings: Logging) -> None:
    """Raises InputError if a writer that the job asks for needs a package that is not installed."""
    for key, setting in settings.services.items():
        service = SERVICES[key]
        if find_spec(service.module) is None:
            raise InputError(
                f"{setting} needs the package {service.package}, which is not installed: install it with "
                f"`python -m pip install 'clipship[{key}]'`, or turn {service.name} off with "
                f"--set logging.{key}=off"
            )


def open_writers(job: Job, folder: Path, steps_done: int) -> list[MetricWriter]:
    """Opens the writers that the job asks for, in the run folder.

    Raises InputError if a service is not installed or knows no user.
    """
    check_installed(job.logging)
    writers: list[MetricWriter] = []
    if job.logging.tensorboard:
        writers.append(TensorBoard(folder / TENSORBOARD, steps_done, job_text(job)))
    return writers + [SERVICES[key].writer(job, folder) for key in job.logging.services]
