"""The job file's typed model: every key, its unit, its range, its default. No torch, no clock, no network, no file is touched.

`jobfile.py` reads a TOML file into it. Relative paths in a job file are relative to that file. `None` means unset.
"""

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

Text = Annotated[str, StringConstraints(min_length=1, pattern=r"\A[^\x00]*\z")]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]

VariableName = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\z")]
VariableValue = Annotated[str, StringConstraints(pattern=r"\A[^\x00]*\z")]

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Backend = Literal["torch", "horovod"]
BestMetric = Literal[
    "zero_shot_top1",
    "zero_shot_top5",
    "retrieval_i2t_r1",
    "retrieval_i2t_r5",
    "retrieval_i2t_r10",
    "retrieval_t2i_r1",
    "retrieval_t2i_r5",
    "retrieval_t2i_r10",
]
"""Those of which more is better."""

_IMAGE_NAME = re.compile(r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?", re.ASCII)
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SLURM_TIME = re.compile(r"\d+(:[0-5]\d){0,2}|\d+-([01]?\d|2[0-3])(:[0-5]\d){0,2}", re.ASCII)
_LAUNCHERS_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_DIAGNOSIS_S = 30.0  # the supervisors need some seconds to find out who is late
_NO_SPACE = re.compile(r"[!-~]+")


def is_remote(name: str) -> bool:
    """Whether the name is no path: `pipe:...` or a URL such as s3://bucket/0000.tar."""
    return name.startswith("pipe:") or "://" in name


class Section(BaseModel):
    """A table of the job file: frozen, strict (no "8" for 8), unknown keys refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class Data(Section):
    train: tuple[Text, ...] = ()
    """Shards (`data/{0000..0099}.tar`, braces, globs and lists) or tables (.csv, .tsv). Only format = "synthetic" needs none."""
    format: Literal["auto", "webdataset", "table", "synthetic"] = "auto"
    """auto: from the names' endings."""
    image_key: tuple[Text, ...] = ("jpg", "jpeg", "png", "webp")
    """Shards: endings of the member that holds the image; the first that a sample has."""
    caption_key: Text = "txt"
    """Shards: ending of the member that holds the captions, one a line; one is drawn for each epoch."""
    image_column: Text = "image"
    """Tables: column with the image file's path, relative to the table."""
    caption_column: Text = "caption"
    separator: Annotated[str, StringConstraints(min_length=1, max_length=1)] | None = None
    """Tables: None takes a comma for .csv and a tab for .tsv."""
    shuffle_window: Positive = 10_000
    """Samples: how far shuffling carries one within an epoch's sequence, after the shards themselves are shuffled."""
    crop_scale: tuple[float, float] = (0.9, 1.0)
    """Smallest and largest share of the image's area that the random crop of training keeps."""
    workers: Annotated[int, Field(ge=0, le=256)] = 2
    """Loader processes per rank; 0 loads in the rank itself."""
    synthetic_samples: Positive = 1024
    """Samples of an epoch with format = "synthetic"."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("crop_scale")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1] <= 1:
            raise ValueError("must be two numbers, 0 < smallest <= largest <= 1")
        return value

    @model_validator(mode="after")
    def _named(self) -> "Data":
        if not self.train and self.format != "synthetic":
            raise ValueError('train names no shard and no table; only format = "synthetic" needs none')
        return self

    @property
    def kind(self) -> Literal["webdataset", "table", "synthetic"]:
        """The format, with `auto` decided: tables end in .csv or .tsv, everything else is shards."""
        if self.format != "auto":
            return self.format
        tables = [PurePosixPath(name).suffix in (".csv", ".tsv") for name in self.train]
        return "table" if all(tables) else "webdataset"


class Model(Section):
    name: Text = "ViT-B-32"
    """A model that open_clip knows, or the path of a config file (.json) in its format."""
    pretrained: Text | None = None
    """A tag that open_clip knows, a weights file, or a checkpoint of ours to start from."""
    precision: Precision = "fp32"
    """fp32; bf16 autocast; fp16 autocast with a gradient scaler: parameters, features and the loss stay float32. fp64: for proofs."""
    lock_image: bool = False
    """Freeze the image tower."""
    lock_text: bool = False
    """Freeze the text tower."""
    sync_batch_norm: bool = True
    """Batch norm statistics over the global batch, so that the gradient does not depend on the number of ranks."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    channels_last: bool | None = None
    """Memory layout of images and convolutions; None: on for convolutional image towers on a GPU."""
    cache_dir: Text | None = None
    """Where weights and tokenizers are kept; fetched once a node. None: the hub's own default."""
    offline: bool = False
    """Never ask the hub: what is not in the cache is an error."""


class Optim(Section):
    global_batch_size: Positive
    """Samples of one optimizer step, over all ranks. Batch per GPU and accumulation follow from the world."""
    max_batch_size_per_gpu: Positive | None = None
    """Samples of one forward pass; a rank's larger share is accumulated (exactly, from cached features)."""
    epochs: Positive | None = None
    """Passes over the data. Give epochs or steps."""
    steps: Positive | None = None
    """Optimizer steps. Give epochs or steps."""
    loss: Literal["clip", "siglip"] = "clip"
    """clip: softmax over the global batch (arXiv 2103.00020); siglip: a sigmoid for each pair (arXiv 2303.15343)."""
    lr: AboveZero = 5e-4
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; a cosine from lr to min_lr follows."""
    min_lr: NonNegative = 0.0
    weight_decay: NonNegative = 0.2
    """Not applied to gains, biases and the logit scale."""
    beta1: Share = 0.9
    beta2: Share = 0.98
    eps: AboveZero = 1e-6
    grad_clip_norm: AboveZero | None = None
    """Largest norm of the whole gradient, after reduction over the ranks."""

    @model_validator(mode="after")
    def _lengths(self) -> "Optim":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give epochs or steps, one of the two")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is longer than the run of {self.steps} steps")
        return self


class TorchComm(Section):
    """DistributedDataParallel."""

    device_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, gloo on CPUs."""
    bucket_mb: AboveZero = 25.0
    """MiB of gradients that go into one all-reduce: larger ones use the network better, smaller ones overlap earlier."""
    static_graph: bool = False
    """The same parameters are used in every step: DDP may then skip its search. Not with accumulation."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets: saves one copy of them."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """Gradients travel at half the size, and lose what half precision cannot hold."""


class HorovodComm(Section):
    """Horovod; None leaves Horovod's own default."""

    fusion_mb: NonNegative | None = None
    """HOROVOD_FUSION_THRESHOLD, MiB (default 128): small tensors that become ready together travel together."""
    cycle_ms: AboveZero | None = None
    """HOROVOD_CYCLE_TIME, ms (default 1): how often ranks agree on what is ready."""
    cache_capacity: Annotated[int, Field(ge=0)] | None = None
    """HOROVOD_CACHE_CAPACITY, tensors (default 1024) whose negotiation is remembered."""
    compression: Literal["none", "fp16"] = "none"
    """Gradients travel as fp16."""
    hierarchical_allreduce: bool | None = None
    """HOROVOD_HIERARCHICAL_ALLREDUCE: within the node first, then between nodes."""
    hierarchical_allgather: bool | None = None
    """HOROVOD_HIERARCHICAL_ALLGATHER."""
    autotune: bool = False
    """HOROVOD_AUTOTUNE: tries fusion and cycle settings in the first steps. Runs then do not repeat bit for bit."""
    cpu_operations: Literal["mpi", "gloo"] | None = None
    """HOROVOD_CPU_OPERATIONS: what carries CPU tensors (default: mpi where started by MPI). gloo needs launcher = "horovodrun"."""


class Nccl(Section):
    """NCCL; None leaves NCCL's own choice. There is no NCCL_TIMEOUT: see [timeouts]."""

    socket_ifname: Text | None = None
    """NCCL_SOCKET_IFNAME: prefix of the interface; `=eth0` exactly, `^docker` all but."""
    ib_hca: Text | None = None
    """NCCL_IB_HCA: InfiniBand or RoCE adapters, `mlx5_0:1,mlx5_1:1`."""
    algo: Text | None = None
    """NCCL_ALGO: Ring, Tree, ..."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """NCCL_DEBUG."""


class Comm(Section):
    backend: Backend = "torch"
    launcher: Literal["auto", "torchrun", "mpirun", "horovodrun"] = "auto"
    """What starts ranks in `clipship run`. auto: torchrun for torch on one host, mpirun for Horovod and for several hosts."""
    deterministic: bool = False
    """Gradients are added up in fixed groups and order, and torch uses repeatable kernels: the same run gives the same bits. Slower."""
    find_unused_parameters: bool = False
    """For models that leave parameters out of some steps; costs a little in each step."""
    check_replicas_steps: Annotated[int, Field(ge=0)] = 0
    """Compare a checksum of parameters and optimizer state over the ranks every N steps; 0: at the start only."""
    torch: TorchComm = TorchComm()
    horovod: HorovodComm = HorovodComm()
    nccl: Nccl = Nccl()


class Timeouts(Section):
    """Seconds that a phase may last on one rank. Past one the run ends with exit code 124 and says which rank was late."""

    init_s: Seconds = 300.0
    """From the start of a rank until all have met and built the model, or read the checkpoint."""
    first_step_s: Seconds = 600.0
    """The first step of a start, its data included: loaders start, connections are made, kernels chosen."""
    step_s: Seconds = 300.0
    """A step: also the wait for the slowest rank, for the gradient needs all."""
    data_s: Seconds = 240.0
    """The wait for the next batch."""
    eval_s: Seconds = 1800.0
    """One evaluation."""
    checkpoint_s: Seconds = 600.0
    """What the loop waits for a checkpoint; also the time to save when the run is asked to stop."""
    shutdown_s: Seconds = 60.0
    """Between the last step or checkpoint and the end of the process."""
    silence_s: Seconds = 10.0
    """A supervisor that says nothing for so long counts as gone, and its node with it."""
    collective_s: Seconds | None = None
    """torch's own limit on one collective, should the supervisors fail. None: a minute more than the longest of the others."""

    @property
    def longest_s(self) -> float:
        """The longest that one collective may last because a phase does."""
        return max(self.init_s, self.first_step_s, self.step_s, self.eval_s, self.checkpoint_s, self.shutdown_s)

    @property
    def backstop_s(self) -> float:
        """The limit that a communication library gets: later than every phase's, so that the diagnosis comes first."""
        return self.collective_s if self.collective_s is not None else self.longest_s + 60.0

    @property
    def by_phase(self) -> dict[str, float]:
        """The limits under the names of `trainer.health.pulse.Phase`."""
        return {
            "init": self.init_s,
            "first step": self.first_step_s,
            "step": self.step_s,
            "data": self.data_s,
            "evaluation": self.eval_s,
            "checkpoint": self.checkpoint_s,
            "shutdown": self.shutdown_s,
        }

    @model_validator(mode="after")
    def _in_order(self) -> "Timeouts":
        if self.data_s >= self.step_s:
            raise ValueError(
                f"data_s = {self.data_s:g} must be less than step_s = {self.step_s:g}: while one rank waits for its data, "
                f"the others wait for it in their step"
            )
        if self.step_s > self.first_step_s:
            raise ValueError(f"first_step_s = {self.first_step_s:g} must be at least step_s = {self.step_s:g}: the first step does more")
        if self.collective_s is not None and self.collective_s < self.longest_s + _DIAGNOSIS_S:
            name = next(name for name in type(self).model_fields if getattr(self, name) == self.longest_s)
            raise ValueError(
                f"collective_s = {self.collective_s:g} must be at least {self.longest_s + _DIAGNOSIS_S:g}, "
                f"{name} and {_DIAGNOSIS_S:g} s more: a collective lasts as long as the phase that it waits in, "
                f"and torch ends the run without naming the late rank. "
                f"Leave it out to have it follow"
            )
        return self


class Checkpoint(Section):
    """When the state is saved, and what a new start does with it. The end of the run is always saved."""

    every_steps: Positive | None = None
    """Save every N steps."""
    every_minutes: AboveZero | None = 30.0
    """Save when so many minutes have passed since the last one."""
    keep: Positive = 3
    """How many of the last ones stay; the best one stays besides."""
    best: BestMetric | None = None
    """Metric of the evaluation, e.g. zero_shot_top1, by which the best checkpoint is kept too."""
    resume: Text = "auto"
    """auto: from the newest whole checkpoint of the run folder, if any; never; or the path of a checkpoint, ours or open_clip's."""
    every_rank_writes: bool = False
    """Each rank writes its part of the optimizer's state: for large models on a parallel file system that all ranks share."""
    on_failure: Literal["continue", "stop"] = "continue"
    """When one cannot be written (a full disk): say so and go on with the one before, or stop. The last one always stops the run."""


class Eval(Section):
    every_steps: Positive | None = None
    """Evaluate every N steps too, not only at the end."""
    every_epochs: Positive | None = None
    """Evaluate at the end of every N-th epoch too."""
    retrieval: tuple[Text, ...] = ()
    """Shards or tables of captioned images, with the keys and columns of [data], whose captions are looked for by image and the other way
    round; empty: none. All captions of a sample count, and so do all rows of a table that name the same image."""
    zero_shot: tuple[Text, ...] = ()
    """Shards of labelled images to classify by text, or one folder that holds a folder of images for each class; empty: none."""
    class_key: Text = "cls"
    """Ending of the member that holds the class number, from 0."""
    class_names: Text | tuple[Text, ...] = ()
    """The names by class number, or a file with one a line. A folder of folders has numbers in the order of its folders' names, and where
    this is empty their names say what the classes are ("_" reads as a space)."""
    templates: Text | tuple[Text, ...] = ("a photo of a {}.",)
    """Sentences with `{}` for the class name, or a file with one a line. Their features are averaged."""
    batch_size: Positive = 64
    """Images, or texts, of one forward pass."""

    @field_validator("zero_shot", "retrieval", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> "Eval":
        if any(name.endswith(".tar") for name in self.zero_shot) and not self.class_names:
            raise ValueError("zero_shot needs class_names")
        if not self.templates:
            raise ValueError("templates names no sentence")
        wrong = [t for t in self.templates if "{}" not in t] if isinstance(self.templates, tuple) else []
        if wrong:
            raise ValueError(f"template without {{}} for the class name: {wrong[0]!r}")
        return self


class Logging(Section):
    runs: Text = "runs"
    """Folder that holds the run folder, which is called as the job."""
    every_steps: Positive = 10
    """A console line and a record in metrics.jsonl every N steps."""
    tensorboard: bool = True
    """What metrics.jsonl gets goes to event files for TensorBoard too, into the run folder's `tensorboard`."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (W&B) too; offline: into the run folder's `wandb`, for `wandb sync`. Needs the package: clipship[wandb]."""
    wandb_project: Text = "clipship"


class Resources(Section):
    """What the job asks of a cluster. `clipship run` takes --nproc or --hosts instead."""

    nodes: Positive = 1
    gpus_per_node: Positive = 1
    cpus_per_gpu: Positive = 8
    mem_gb_per_gpu: AboveZero | None = None

    @property
    def world_size(self) -> int:
        """Ranks: one for each GPU."""
        return self.nodes * self.gpus_per_node


class Stack(Section):
    """Versions that the container image is built from. Rendering the image comes in a later release."""

    torch: Text = "2.14.1"
    """PyTorch's version; CUDA, NCCL and Horovod follow from it."""


class Image(Section):
    """The container image that a cluster runs."""

    tag: Text | None = None
    """Its full name, as `docker pull` takes it. None: the job runs without a container."""

    @field_validator("tag")
    @classmethod
    def _a_reference(cls, value: str | None) -> str | None:
        if value is not None and not _IMAGE_NAME.fullmatch(value):
            raise ValueError(f'"{value}" is no image name; expected [registry/]name[:tag], the name in lower case')
        return value


class Slurm(Section):
    """What sbatch asks for beside [resources]. Rendering the batch script comes in a later release."""

    partition: Text | None = None
    account: Text | None = None
    qos: Text | None = None
    time: Text | None = None
    """Limit on the run time: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. None: the partition's own."""

    @field_validator("partition", "account", "qos")
    @classmethod
    def _one_word(cls, value: str | None) -> str | None:
        if value is not None and not _NO_SPACE.fullmatch(value):
            raise ValueError(f'"{value}" must be one word of ASCII characters')
        return value

    @field_validator("time")
    @classmethod
    def _a_time_limit(cls, value: str | None) -> str | None:
        if value is not None and not _SLURM_TIME.fullmatch(value):
            forms = '"90" (minutes), "30:00" (MM:SS), "12:30:00" (HH:MM:SS), "2-12" (D-HH), "2-12:30" or "2-12:30:00"'
            raise ValueError(f'"{value}" is no time limit of Slurm; write it as {forms}')
        return value


class Kubernetes(Section):
    """What the MPIJob asks for beside [resources]. Rendering it comes in a later release."""

    namespace: Text | None = None
    """None: the namespace that kubectl's context names."""

    @field_validator("namespace")
    @classmethod
    def _a_dns_label(cls, value: str | None) -> str | None:
        if value is not None and not _DNS_LABEL.fullmatch(value):
            raise ValueError(f'"{value}" is no namespace; expected at most 63 of a-z, 0-9 and "-", with no "-" at the ends (RFC 1123)')
        return value


class Job(Section):
    """One training run, from the image to the checkpoint."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """Names the run folder."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Weights, order of samples, augmentation, dropout: all follow from it."""
    data: Data
    model: Model = Model()
    optim: Optim
    comm: Comm = Comm()
    timeouts: Timeouts = Timeouts()
    env: dict[VariableName, VariableValue] = {}
    """More environment variables for every rank, as text. `clipship check` says which names nobody reads."""
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    logging: Logging = Logging()
    stack: Stack = Stack()
    image: Image = Image()
    resources: Resources = Resources()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()

    @property
    def retrieval_data(self) -> Data:
        """The retrieval set in the words of [data]."""
        return self.data.model_copy(update={"train": self.eval.retrieval, "format": "auto"})

    @model_validator(mode="after")
    def _best_is_measured(self) -> "Job":
        best = self.checkpoint.best
        if best and not (self.eval.retrieval if best.startswith("retrieval") else self.eval.zero_shot):
            raise ValueError(f"checkpoint.best = {best} needs eval.{'retrieval' if best.startswith('retrieval') else 'zero_shot'}")
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
