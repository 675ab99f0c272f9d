"""The job file: its typed model and its reader. Imports no torch and opens no file but the job file.

The names below are imported on first use: the model brings pydantic, and `clipship --help` must not wait for
it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.comm import Backend as Backend
    from trainer.config.comm import Comm as Comm
    from trainer.config.comm import HorovodComm as HorovodComm
    from trainer.config.comm import Nccl as Nccl
    from trainer.config.comm import TorchComm as TorchComm
    from trainer.config.data import Data as Data
    from trainer.config.health import Health as Health
    from trainer.config.image import Image as Image
    from trainer.config.image import Stack as Stack
    from trainer.config.job import Job as Job
    from trainer.config.kubernetes import Kubernetes as Kubernetes
    from trainer.config.recovery import Recovery as Recovery
    from trainer.config.resources import Resources as Resources
    from trainer.config.results import BestMetric as BestMetric
    from trainer.config.results import Checkpoint as Checkpoint
    from trainer.config.results import Eval as Eval
    from trainer.config.results import Logging as Logging
    from trainer.config.slurm import Slurm as Slurm
    from trainer.config.timeouts import Timeouts as Timeouts
    from trainer.config.training import Model as Model
    from trainer.config.training import Optim as Optim
    from trainer.config.training import Precision as Precision
    from trainer.config.types import STANDARD_INPUT as STANDARD_INPUT
    from trainer.config.types import Section as Section
    from trainer.config.types import is_remote as is_remote
    from trainer.config.types import is_stream as is_stream

_NAMES = {
    "comm": "Backend Comm HorovodComm Nccl TorchComm",
    "data": "Data",
    "health": "Health",
    "image": "Image Stack",
    "job": "Job",
    "kubernetes": "Kubernetes",
    "recovery": "Recovery",
    "resources": "Resources",
    "results": "BestMetric Checkpoint Eval Logging",
    "slurm": "Slurm",
    "timeouts": "Timeouts",
    "training": "Model Optim Precision",
    "types": "STANDARD_INPUT Section is_remote is_stream",
}
"""Names by the modules of this folder that have them."""
_HOMES = {name: f"trainer.config.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
