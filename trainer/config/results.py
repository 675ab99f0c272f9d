"""`[checkpoint]`, `[eval]` and `[logging]`: what a run saves, measures and logs."""

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trainer.config.keys import JobPath, OnlyIf
from trainer.config.stores import STORES, store_of
from trainer.config.types import (
    AboveZero,
    Positive,
    Seconds,
    Section,
    Text,
    is_remote,
    is_stream,
    one_or_many,
    optional_section,
)
from trainer.text.masking import masked, secret_in

EMA, MIX = "ema_", "mix_"
"""Begin of the names of metrics of the weights' moving average, and of their mixture with the first ones."""
_METRICS = (
    *("zero_shot_top1", "zero_shot_top5"),
    *("retrieval_i2t_r1", "retrieval_i2t_r5", "retrieval_i2t_r10"),
    *("retrieval_t2i_r1", "retrieval_t2i_r5", "retrieval_t2i_r10"),
)
if TYPE_CHECKING:
    BestMetric = str
else:
    BestMetric = Literal[tuple(weights + metric for weights in ("", EMA, MIX) for metric in _METRICS)]
    """Metrics of the evaluation for which more is better."""


OPEN_CLIP_ENDING = ".pt"
"""Ending of the checkpoints that open_clip_train writes."""


def is_checkpoint(name: str) -> bool:
    """Returns whether `checkpoint.resume` is a path, and neither auto nor never."""
    return name not in ("auto", "never")


def is_folder(name: str) -> bool:
    """Returns whether `checkpoint.copy_to` is a path, and not an address of object storage."""
    return not is_remote(name)


NAMED_SET = "set:"
"""Beginning of an `eval.templates` or `eval.class_names` that names a set of words."""


def is_file_of_words(name: str) -> bool:
    """Returns whether `eval.templates` or `eval.class_names` is a path, and no set and no address."""
    return not name.startswith(NAMED_SET) and not is_remote(name)


def _are_shards(names: tuple[str, ...]) -> bool:
    """Returns whether a zero-shot set is named by shards or a pattern, and not as one folder of folders."""
    return len(names) != 1 or bool(PurePosixPath(names[0]).suffix or set("*?[{") & set(names[0]))


WITH_EVALUATION = OnlyIf(lambda job: job.eval.in_the_run, "eval.retrieval and eval.zero_shot name no data")
_WITH_ANY = OnlyIf(
    lambda job: job.eval.anywhere, "eval.retrieval, eval.zero_shot and eval.suite name no data"
)
_WITH_ZERO_SHOT = OnlyIf(lambda job: bool(job.eval.zero_shot), "eval.zero_shot names no data")
_WITH_CLASSES = OnlyIf(
    lambda job: bool(job.eval.zero_shot or job.eval.suite.folders),
    "eval.zero_shot and eval.suite.folders name no data",
)
_IN_SHARDS = OnlyIf(
    lambda job: _are_shards(job.eval.zero_shot), "the folders of eval.zero_shot are the classes"
)
_WITH_COPIES = OnlyIf(lambda job: job.checkpoint.copy_to is not None, "there is no checkpoint.copy_to")
_WITH_WANDB = OnlyIf(lambda job: job.logging.wandb != "off", 'logging.wandb is "off"')
_WITH_SWANLAB = OnlyIf(lambda job: job.logging.swanlab != "off", 'logging.swanlab is "off"')
_WITH_MLFLOW = OnlyIf(lambda job: job.logging.mlflow != "off", 'logging.mlflow is "off"')


class Suite(Section):
    """A suite of data sets that `clipship eval` measures a model on. A run itself does not."""

    names: tuple[Text, ...] = ()
    """Suites (datacomp, vtab, imagenet, retrieval, long, xm3600, sugar_crepe, cvqa, own) and single data sets
    of them, such as "vtab/pets"; empty: none. "knn:NAME" and "linear:NAME" measure by nearest neighbours and
    by a linear probe, which learn from the set's folder `train`. `clipship eval --suite NAME` replaces
    them."""
    root: Annotated[Text | None, JobPath("folder", ranks=False)] = None
    """Folder with the public data sets, each in its own folder, such as wds_imagenet1k_test, as
    CLIP_benchmark and DataComp lay them out. Nothing is downloaded; `clipship check` says which ones are
    there."""
    folders: Annotated[tuple[Text, ...], JobPath("folder", ranks=False)] = ()
    """Folders of own data sets, which the name "own" stands for. Each is laid out like a public one, or holds
    a folder of images for each class."""

    _lists = field_validator("names", "folders", mode="before")(one_or_many)


class Checkpoint(Section):
    """Times at which the state is saved, and how a new start uses it. The end of the run is always saved."""

    every_steps: Positive | None = None
    """Save every N steps."""
    every_minutes: AboveZero | None = 30.0
    """Save when this many minutes have passed since the last save."""
    keep: Positive = 3
    """Number of newest checkpoints to keep; the best one is kept in addition."""
    best: BestMetric | None = None
    """Metric of the evaluation, such as zero_shot_top1, by which the best checkpoint is kept as well."""
    resume: Annotated[Text, JobPath(when=is_checkpoint)] = "auto"
    """auto: resume from the newest complete checkpoint of the run folder, if any; never: begin anew; or the
    path of a checkpoint, of Clipship or open_clip, to start from. A later start with the same path resumes
    from what the previous one has saved, and so does a later start of a submission with never, such as a job
    that is queued again."""
    longer: bool = False
    """Let a start go on to more steps than the run had before, as `clipship run --longer` does. The learning
    rate then follows the longer curve, from the first new step on."""
    shorter: bool = False
    """Let a start end at fewer steps than the run was to have, as `clipship run --shorter` does, which sets
    optim.decay_from_step, too."""
    every_rank_writes: bool = False
    """Let each rank write its part of the optimizer's state: for large models on a parallel file system that
    all ranks share."""
    copy_to: Annotated[Text | None, JobPath("folder", when=is_folder, made=True)] = None
    """Place that gets a copy of each whole checkpoint in the background, such as "s3://bucket/prefix", or a
    folder of another file system; the run's copies are in a folder of its name there. It keeps as many as
    `keep` and `best` say. [data.storage] says how it is reached. None: nothing is copied."""
    copy_wait_s: Annotated[Seconds, _WITH_COPIES] = 600.0
    """Longest that the end of the run waits for its last copy, within three quarters of
    timeouts.checkpoint_s. A run that is asked to stop waits at most 10 s: its next start copies."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Reaction if a checkpoint cannot be written, for example to a full disk. continue: report it and go on,
    keeping the previous one; stop: end the run. A failure of the last checkpoint always ends the run."""

    @field_validator("copy_to")
    @classmethod
    def _a_place(cls, value: str | None) -> str | None:
        if value is None or is_folder(value):
            return value
        row = store_of(value)
        if row is None:
            known = ", ".join(row.addresses for row in STORES)
            raise ValueError(
                f"must be a folder, or an address that begins with {known} (given {masked(value)[:80]!r})"
            )
        if not value.partition("://")[2].strip("/"):
            raise ValueError(f"lacks the bucket: write it as {row.protocols[0]}://BUCKET/PREFIX")
        return value.rstrip("/")


class Eval(Section):
    """Evaluation: data, frequency and how classes become sentences."""

    every_steps: Annotated[Positive | None, WITH_EVALUATION] = None
    """Evaluate every N steps, in addition to the end."""
    every_epochs: Annotated[Positive | None, WITH_EVALUATION] = None
    """Evaluate at the end of every N-th epoch, in addition to the end."""
    retrieval: Annotated[tuple[Text, ...], JobPath("patterns")] = ()
    """Shards or tables of captioned images for retrieval in both directions, with the keys and columns of
    [data], here or at addresses; empty: no retrieval. All captions of a sample count, and so do all rows of
    a table that name the same image."""
    zero_shot: Annotated[tuple[Text, ...], JobPath("patterns")] = ()
    """Shards of labelled images for zero-shot classification, or one folder with a folder of images for each
    class; empty: none. Shards may lie at addresses, as those of data.train."""
    class_key: Annotated[Text, _WITH_ZERO_SHOT, _IN_SHARDS] = "cls"
    """Ending of the member that holds the class number, counted from 0."""
    class_names: Annotated[
        Text | tuple[Text, ...], JobPath(when=is_file_of_words, lists=False), _WITH_ZERO_SHOT
    ] = ()
    """Class names in the order of their numbers, a file or an address with one per line, or "set:imagenet":
    open_clip's names of ImageNet's 1,000 classes, in the order of the folders' WordNet numbers. The classes
    of a folder are numbered in the order of its subfolders' names; if this is empty, those names are the
    class names ("_" reads as a space)."""
    templates: Annotated[
        Text | tuple[Text, ...], JobPath(when=is_file_of_words, lists=False), _WITH_CLASSES
    ] = ("a photo of a {}.",)
    """Sentences with `{}` for the class name, a file or an address with one per line, or a set by its name:
    "set:chinese", "set:english", and "set:imagenet", open_clip's 80 sentences. Their features are
    averaged."""
    mix: Annotated[float | None, Field(gt=0, lt=1), WITH_EVALUATION] = None
    """Share of the trained weights in a mixture with those that the run began with (WiSE-FT, arXiv
    2109.01903), which the run's evaluations measure, too: their metrics begin with mix_. It often forgets
    less than the trained weights; 0.5 is a good begin. Needs model.init or model.pretrained, which each start
    reads again. None: no mixture is measured."""
    batch_size: Annotated[Positive, _WITH_ANY] = 64
    """Images, or texts, in one forward pass."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Reaction if an evaluation fails, for example because it has too many bad samples or a file is gone.
    continue: report it and go on without its metrics; stop: save the step and end the run."""
    suite: Suite = optional_section(Suite)

    @property
    def in_the_run(self) -> bool:
        """True if the run itself evaluates."""
        return bool(self.retrieval or self.zero_shot)

    @property
    def anywhere(self) -> bool:
        """True if the run evaluates, or if the job says where `clipship eval` finds a suite."""
        return self.in_the_run or bool(self.suite.root or self.suite.folders)

    _lists = field_validator("zero_shot", "retrieval", mode="before")(one_or_many)

    @model_validator(mode="after")
    def _complete(self) -> "Eval":
        streams = [name for name in (*self.zero_shot, *self.retrieval) if is_stream(name)]
        if streams:
            raise ValueError(
                f"{streams[0]} is a stream, and ranks cannot share the samples of a stream: give shards"
            )
        folders = [name for name in self.zero_shot if is_remote(name) and "." not in name.rpartition("/")[2]]
        if folders:
            raise ValueError(
                f"zero_shot: {masked(folders[0])} is no shard, and folders of images are read from file "
                "systems only: give a folder there, or shards (.tar), which may lie at addresses"
            )
        if any(name.endswith(".tar") for name in self.zero_shot) and not self.class_names:
            raise ValueError("zero_shot needs class_names")
        if not self.templates:
            raise ValueError("templates is empty: give at least one sentence")
        wrong = [t for t in self.templates if "{}" not in t] if isinstance(self.templates, tuple) else []
        if wrong:
            raise ValueError(f"template without {{}} for the class name: {wrong[0]!r}")
        return self


class Logging(Section):
    """Run folder, and where metrics are written."""

    runs: Annotated[Text, JobPath("folder")] = "runs"
    """Folder that holds the run folder, which has the job's name."""
    every_steps: Positive = 10
    """Write a console line and a record in metrics.jsonl every N steps."""
    tensorboard: bool = True
    """Write the metrics to event files for TensorBoard too, in the run folder's `tensorboard`."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Send the metrics to Weights & Biases (W&B) too. offline: write them to the run folder's `wandb`, for
    `wandb sync`. Needs the package: clipship[wandb]."""
    wandb_project: Annotated[Text, _WITH_WANDB] = "clipship"
    """Project of Weights & Biases that the run belongs to."""
    swanlab: Literal["off", "offline", "online"] = "off"
    """Send the metrics to SwanLab too. offline: write them to the run folder's `swanlab`, for
    `swanlab sync`. Needs the package: clipship[swanlab]."""
    swanlab_project: Annotated[Text, _WITH_SWANLAB] = "clipship"
    """Project of SwanLab that the run belongs to."""
    mlflow: Text = "off"
    """Send the metrics to an MLflow server too: its address, such as "https://mlflow.example.org". Needs the
    package: clipship[mlflow]."""
    mlflow_experiment: Annotated[Text, _WITH_MLFLOW] = "clipship"
    """Experiment of MLflow that the run belongs to."""
    notify: tuple[Literal["fault", "end"], ...] = ()
    """Events about which a message goes to the address in the variable CLIPSHIP_NOTIFY_URL, such as a webhook
    of Slack, Feishu, DingTalk, WeCom or Discord. fault: the ranks go on after a fault; end: a start has
    ended, in whatever way."""

    @property
    def services(self) -> dict[str, str]:
        """Setting of each service that gets the metrics, by the extra of clipship that brings its package."""
        return {
            name: f'logging.{name} = "{value}"'
            for name in ("wandb", "swanlab", "mlflow")
            if (value := getattr(self, name)) != "off"
        }

    @field_validator("mlflow")
    @classmethod
    def _an_address(cls, value: str) -> str:
        if value != "off" and not re.fullmatch(r"https?://[^\s/]\S*", value):
            raise ValueError(
                f'"{masked(value)}" is not an address; expected https://host or http://host:port'
            )
        if secret := secret_in(value):
            raise ValueError(
                f"contains {secret}, which the run's records would show: ranks take MLFLOW_TRACKING_TOKEN "
                "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, from their environment"
            )
        return value
