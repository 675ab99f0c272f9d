"""The job file's typed model: every key with its unit, range and default.

`loader.py` reads a TOML file into it. Relative paths in a job file are relative to that file, and `None`
means unset. Uses no torch, no clock, no network and no file.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, StringConstraints, create_model, field_validator, model_validator

from trainer.config.comm import Comm
from trainer.config.data import Data
from trainer.config.formats import FORMATS, FormatRow
from trainer.config.image import Image, Stack
from trainer.config.keys import MAY_CHANGE, OnlyIf
from trainer.config.losses import LOSSES
from trainer.config.recovery import Health, Recovery, Timeouts
from trainer.config.resources import Resources
from trainer.config.results import EMA, MIX, OPEN_CLIP_ENDING, Checkpoint, Eval, Logging
from trainer.config.sections import SECTIONS
from trainer.config.storage import addressed
from trainer.config.stores import store_of
from trainer.config.training import Model, Optim
from trainer.config.types import (
    SchedulerSection,
    Section,
    VariableName,
    VariableValue,
    optional_section,
    refuse,
)

if TYPE_CHECKING:
    from trainer.config.kubernetes import Kubernetes
    from trainer.config.slurm import Slurm

_LONGEST_NAME = 240
"""Longest name in bytes. File systems allow 255, and the names of some files beside the run folder begin with
it."""
LAUNCHERS_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"),
    *("HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_CONTROLLER"),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
}
"""Variables that a launcher sets for each rank."""


_WITH_IMAGE = OnlyIf(lambda job: job.image.tag is not None, "image.tag is not set, so the job has no image")


class Job(Section):
    """One training run, from the image to the checkpoint."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """Name of the run and of its folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of weights, order of samples, augmentation and dropout."""
    data: Data
    model: Model = optional_section(Model)
    optim: Optim
    comm: Annotated[Comm, MAY_CHANGE] = optional_section(Comm)
    timeouts: Annotated[Timeouts, MAY_CHANGE] = optional_section(Timeouts)
    env: Annotated[dict[VariableName, VariableValue], MAY_CHANGE] = Field(default_factory=dict)
    """Additional environment variables for every rank, as text. `clipship check` names those that no library
    reads."""
    recovery: Annotated[Recovery, MAY_CHANGE] = optional_section(Recovery)
    checkpoint: Annotated[Checkpoint, MAY_CHANGE] = optional_section(Checkpoint)
    eval: Annotated[Eval, MAY_CHANGE] = optional_section(Eval)
    logging: Annotated[Logging, MAY_CHANGE] = optional_section(Logging)
    health: Annotated[Health, MAY_CHANGE] = optional_section(Health)
    stack: Annotated[Stack, MAY_CHANGE, _WITH_IMAGE] = optional_section(Stack)
    image: Annotated[Image, MAY_CHANGE, _WITH_IMAGE] = optional_section(Image)
    resources: Annotated[Resources, MAY_CHANGE] = optional_section(Resources)

    stage: tuple[dict[str, Any], ...] = ()
    """Stages that follow the job's own training, each a table [[stage]] with a name and keys of [model],
    [optim] and [data] in place of the job's, such as optim.steps = 2000 and model.image_size = 336. Each
    begins with the weights of the one before, fitted to its size, and with a new optimizer. Empty: one."""

    if TYPE_CHECKING:  # the schedulers' sections, which are added below for each of SECTIONS
        slurm: Slurm
        kubernetes: Kubernetes

    @property
    def retrieval_data(self) -> Data:
        """The retrieval set of [eval], as a section [data] would describe it."""
        return self.data.model_copy(
            update={
                "train": self.eval.retrieval,
                "format": "auto",
                "weights": None,
                "filters": (),
                "scores": (),
                "group_by": None,
            }
        )

    @property
    def formats(self) -> list[FormatRow]:
        """Formats of the training data and of the retrieval set."""
        sets = (self.data, *([self.retrieval_data] if self.eval.retrieval else ()))
        return [FORMATS[data.kind] for data in sets]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The names that may be addresses of object storage."""
        others = (self.checkpoint.copy_to, self.eval.class_names, self.eval.templates)
        single = (name for name in others if isinstance(name, str))
        return (
            *(*self.data.train, *self.data.scores, *self.model.targets, *self._data_of_stages),
            *(*self.eval.retrieval, *self.eval.zero_shot, *single),
        )

    @property
    def _data_of_stages(self) -> Iterator[str]:
        """The names of data that the stages have for themselves; a stage may not be checked yet."""
        for table in self.stage:
            data = table.get("data")
            if not isinstance(data, dict):
                continue
            for key in ("train", "scores"):
                given = data.get(key, ())
                names = given if isinstance(given, tuple) else (given,)
                yield from (name for name in names if isinstance(name, str))

    @property
    def in_image(self) -> bool:
        """True if ranks on a cluster run in the container image, not with this machine's packages."""
        return self.image.tag is not None and any(section.uses_image for section in self.schedulers.values())

    @property
    def schedulers(self) -> dict[str, SchedulerSection]:
        """Sections of the schedulers that the job file names, in the order of SECTIONS."""
        return {name: getattr(self, name) for name in SECTIONS if name in self.model_fields_set}

    @property
    def offline(self) -> bool:
        """True if ranks must not ask the hub for weights and tokenizers."""
        return bool(self.schedulers) if self.model.offline is None else self.model.offline

    @property
    def keeps_first_weights(self) -> bool:
        """True if every start needs the weights that the run began with."""
        return self.eval.mix is not None or self.optim.anchor > 0

    @property
    def asks_for_gpus(self) -> str:
        """The key by which the job asks for GPUs, with its value; "" if it asks for none."""
        if self.resources.on_cpu:
            return ""
        if self.resources.device == "gpu":
            return 'resources.device = "gpu"'
        if self.resources.gpus_per_node is None or any(
            section.without_gpus for section in self.schedulers.values()
        ):
            return ""
        return f"resources.gpus_per_node = {self.resources.gpus_per_node}"

    @model_validator(mode="before")
    @classmethod
    def _goes_on_as_open_clip(cls, table: Any) -> Any:
        """Pictures stay as open_clip_train has seen them if the job goes on from its checkpoint."""
        sections = table if isinstance(table, dict) else {}
        data, checkpoint = sections.get("data"), sections.get("checkpoint")
        resume = checkpoint.get("resume") if isinstance(checkpoint, dict) else None
        if isinstance(data, dict) and isinstance(resume, str) and resume.endswith(OPEN_CLIP_ENDING):
            return {**sections, "data": {"transparency": "drop_alpha", **data}}
        return table

    @model_validator(mode="after")
    def _computes_in_its_formats(self) -> "Job":
        if self.model.precision == "tf32" and not self.resources.row.runs_cuda:
            raise ValueError(
                f'model.precision = "tf32" is a format of CUDA, and resources.accelerator = '
                f'"{self.resources.accelerator}": use "bf16" or "fp32"'
            )
        return self

    @model_validator(mode="after")
    def _storage_has_its_keys(self) -> "Job":
        addressed(self.data.storage, self.addresses)
        if self.data.storage.anonymous and self.checkpoint.copy_to and store_of(self.checkpoint.copy_to):
            raise ValueError(
                "data.storage.anonymous = true asks without keys, and checkpoint.copy_to is written with "
                "keys: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _an_image_passes(self) -> "Job":
        limit, budgets = self.optim.max_image_tokens_per_gpu, self.model.token_budgets
        if limit is not None and not budgets:
            raise ValueError("optim.max_image_tokens_per_gpu needs model.image_tokens: give both or neither")
        if limit is not None and limit < max(budgets):
            raise ValueError(
                f"optim.max_image_tokens_per_gpu = {limit} is less than one image of model.image_tokens = "
                f"{max(budgets)} has: give at least as many"
            )
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> "Job":
        best = self.checkpoint.best
        if best is None:
            return self
        measured = "retrieval" if "retrieval" in best else "zero_shot"
        if not getattr(self.eval, measured):
            raise ValueError(f"checkpoint.best = {best} needs eval.{measured}")
        if best.startswith(EMA) and self.optim.ema_decay is None:
            raise ValueError(f"checkpoint.best = {best} needs optim.ema_decay")
        if best.startswith(MIX) and self.eval.mix is None:
            raise ValueError(f"checkpoint.best = {best} needs eval.mix")
        return self

    @model_validator(mode="after")
    def _first_weights_are_given(self) -> "Job":
        if self.model.pretrained is not None or self.model.init is not None:
            return self
        for key, value, does in (
            ("eval.mix", self.eval.mix, "mixes trained weights with"),
            ("optim.anchor", self.optim.anchor, "pulls trained weights to"),
        ):
            if value:
                raise ValueError(
                    f"{key} = {value:g} {does} those that the run began with, which are random: set "
                    f"model.init or model.pretrained, or leave {key} out"
                )
        return self

    @model_validator(mode="after")
    def _teachers_judge_all_pairs(self) -> "Job":
        key = self.model.judged_by
        if key is None:
            return self
        if LOSSES[self.optim.loss].captions:
            raise ValueError(
                f"{key} is for the losses clip and siglip, and not for {self.optim.loss}: set one of them as "
                "optim.loss"
            )
        if self.optim.max_batch_size_per_gpu == "auto" and self.model.teacher is not None:
            raise ValueError(
                'optim.max_batch_size_per_gpu = "auto" does not know what model.teacher takes: give a number'
            )
        return self

    @model_validator(mode="after")
    def _groups_have_ids(self) -> "Job":
        if self.optim.positives != "groups":
            return self
        if self.data.group_by is None:
            raise ValueError(
                'optim.positives = "groups" needs data.group_by, which names the field or column with the id '
                'of each sample\'s group, such as "json:group_id"'
            )
        if "group_by" not in FORMATS[self.data.kind].reads or self.data.streams:
            raise ValueError(
                'optim.positives = "groups" needs ids, which come from shards and tables. Neither streams '
                'nor synthetic data give any: pack the samples into shards, or choose "captions" or "images".'
            )
        return self

    @model_validator(mode="after")
    def _targets_have_shards(self) -> "Job":
        if self.model.targets and ("scores" not in FORMATS[self.data.kind].reads or self.data.streams):
            raise ValueError(
                "model.targets has a file for each shard, Parquet or Arrow file of data.train, and not for "
                ".csv and .tsv tables, streams and synthetic data: `clipship pack` makes shards of a table"
            )
        return self

    @property
    def compiler_in_image(self) -> bool:
        return self.model.compile if self.image.compiler is None else self.image.compiler

    @model_validator(mode="after")
    def _what_compiles_has_a_compiler(self) -> "Job":
        if self.model.compile and not self.compiler_in_image:
            raise ValueError(
                "model.compile needs the compiler that image.compiler = false leaves out: remove one of the "
                "two"
            )
        return self

    @field_validator("env")
    @classmethod
    def _free_names(cls, value: dict[str, str]) -> dict[str, str]:
        refuse(
            (name for name in value if name.startswith("CLIPSHIP_") or name in LAUNCHERS_NAMES),
            "cannot be set by a job, because the launcher sets it for each rank",
        )
        return value

    @field_validator("name")
    @classmethod
    def _a_folder_name(cls, value: str) -> str:
        if value in (".", "..") or "/" in value or not value.isprintable() or value != value.strip():
            raise ValueError(
                "must be usable as the name of a folder: printable, without slashes, no space at the ends"
            )
        if len(value.encode()) > _LONGEST_NAME:
            raise ValueError(
                f"must be usable as the name of a folder: at most {_LONGEST_NAME} bytes, and it has "
                f"{len(value.encode())}"
            )
        return value


if not TYPE_CHECKING:
    Job = create_model(
        "Job",
        __base__=Job,
        __doc__=Job.__doc__,
        __module__=__name__,
        **{
            name: (Annotated[section, MAY_CHANGE], optional_section(section))
            for name, section in SECTIONS.items()
        },
    )
