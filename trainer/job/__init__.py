"""The job file's typed model: every key, its unit, its range, its default. No torch, no clock, no network, no file is touched.

`jobfile.py` reads a TOML file into it. Relative paths in a job file are relative to that file. `None` means unset.
"""

from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from trainer.job.comm import Backend, Comm, HorovodComm, Nccl, TorchComm
from trainer.job.data import Data
from trainer.job.fields import STANDARD_INPUT, Section, VariableName, VariableValue, is_remote, is_stream, left_out
from trainer.job.health import Health
from trainer.job.image import Image, Stack
from trainer.job.kubernetes import Kubernetes
from trainer.job.outcome import BestMetric, Checkpoint, Eval, Logging
from trainer.job.resources import Resources
from trainer.job.slurm import Slurm
from trainer.job.timeouts import Timeouts
from trainer.job.training import Model, Optim, Precision

__all__ = [
    "STANDARD_INPUT",
    "Backend",
    "BestMetric",
    "Checkpoint",
    "Comm",
    "Data",
    "Eval",
    "Health",
    "HorovodComm",
    "Image",
    "Job",
    "Kubernetes",
    "Logging",
    "Model",
    "Nccl",
    "Optim",
    "Precision",
    "Resources",
    "Section",
    "Slurm",
    "Stack",
    "Timeouts",
    "TorchComm",
    "is_remote",
    "is_stream",
]

_LAUNCHERS_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Job(Section):
    """One training run, from the image to the checkpoint."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """Names the run folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Weights, order of samples, augmentation, dropout: all follow from it."""
    data: Data
    model: Model = left_out(Model)
    optim: Optim
    comm: Comm = left_out(Comm)
    timeouts: Timeouts = left_out(Timeouts)
    env: dict[VariableName, VariableValue] = Field(default_factory=dict)
    """More environment variables for every rank, as text. `clipship check` says which names nobody reads."""
    checkpoint: Checkpoint = left_out(Checkpoint)
    eval: Eval = left_out(Eval)
    logging: Logging = left_out(Logging)
    health: Health = left_out(Health)
    stack: Stack = left_out(Stack)
    image: Image = left_out(Image)
    resources: Resources = left_out(Resources)
    slurm: Slurm = left_out(Slurm)
    kubernetes: Kubernetes = left_out(Kubernetes)

    @property
    def retrieval_data(self) -> Data:
        """The retrieval set in the words of [data]."""
        return self.data.model_copy(update={"train": self.eval.retrieval, "format": "auto", "weights": None})

    @property
    def in_image(self) -> bool:
        """Whether a cluster's ranks run in the container image, and this machine's packages are not theirs."""
        return self.image.tag is not None and ("kubernetes" in self.model_fields_set or self.slurm.container != "none")

    @model_validator(mode="after")
    def _best_is_measured(self) -> "Job":
        best = self.checkpoint.best
        if best and not (self.eval.retrieval if best.startswith("retrieval") else self.eval.zero_shot):
            raise ValueError(f"checkpoint.best = {best} needs eval.{'retrieval' if best.startswith('retrieval') else 'zero_shot'}")
        return self

    @property
    def compiler_in_image(self) -> bool:
        return self.model.compile if self.image.compiler is None else self.image.compiler

    @model_validator(mode="after")
    def _what_compiles_has_a_compiler(self) -> "Job":
        if self.model.compile and not self.compiler_in_image:
            raise ValueError("model.compile needs the compiler that image.compiler = false leaves out: drop one of the two")
        return self

    @field_validator("env")
    @classmethod
    def _free_names(cls, value: dict[str, str]) -> dict[str, str]:
        taken = [name for name in value if name.startswith("CLIPSHIP_") or name in _LAUNCHERS_NAMES]
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be set by a job: what starts the ranks gives each its own")
        return value

    @field_validator("name")
    @classmethod
    def _a_folder_name(cls, value: str) -> str:
        if value in (".", "..") or "/" in value or not value.isprintable() or value != value.strip():
            raise ValueError("must be usable as the name of a folder: printable, no slash, no space at the ends")
        return value
