"""The job file: its typed model and its reader. Imports no torch and opens no file but the job file.

The names below are imported on first use: the model brings pydantic, and `clipship --help` must not wait for
it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.comm import Backend, Comm, HorovodComm, Nccl, TorchComm
    from trainer.config.data import Data
    from trainer.config.image import Image, Stack
    from trainer.config.job import Job
    from trainer.config.kubernetes import Kubernetes
    from trainer.config.recovery import Health, Recovery, Timeouts
    from trainer.config.resources import Resources
    from trainer.config.results import BestMetric, Checkpoint, Eval, Logging
    from trainer.config.slurm import Slurm
    from trainer.config.training import Model, Optim, Precision
    from trainer.config.types import STANDARD_INPUT, Section, is_remote, is_stream


_NAMES = {
    "comm": "Backend Comm HorovodComm Nccl TorchComm",
    "data": "Data",
    "image": "Image Stack",
    "job": "Job",
    "kubernetes": "Kubernetes",
    "recovery": "Health Recovery Timeouts",
    "resources": "Resources",
    "results": "BestMetric Checkpoint Eval Logging",
    "slurm": "Slurm",
    "training": "Model Optim Precision",
    "types": "STANDARD_INPUT Section is_remote is_stream",
}
"""Names by the modules of this folder that have them."""
_HOMES = {name: f"trainer.config.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
