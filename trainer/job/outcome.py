"""`[checkpoint]`, `[eval]` and `[logging]`: what a run saves, measures and says."""

from typing import Literal

from pydantic import field_validator, model_validator

from trainer.job.fields import AboveZero, Positive, Section, Text, is_stream

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
    """auto: from the newest whole checkpoint of the run folder, if any; never; or the path of a checkpoint, ours or open_clip's.

    A start with the same path goes on from what the one before it has written."""
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
        streams = [name for name in (*self.zero_shot, *self.retrieval) if is_stream(name)]
        if streams:
            raise ValueError(f"{streams[0]}: a stream cannot be read by place, as sharing an evaluation between ranks needs: give shards")
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
