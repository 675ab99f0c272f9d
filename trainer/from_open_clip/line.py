"""A command line of open_clip_train with its defaults, and what follows from several flags together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.formats import row_of
from trainer.errors import InputError

PIPE = "pipe:"
SOURCES = "::"
"""Text between two sources in --train-data and --val-data."""
RELEASES = ("3.3", "4")
"""Releases of open_clip_torch whose flags are known; 4 is what its main branch becomes."""
_FORMATS = {
    "webdataset": "webdataset",
    "webdataset-audio": "webdataset",
    "csv": "table",
    "synthetic": "synthetic",
    "synthetic-audio": "synthetic",
}
_PATCHES = (128, 256, 576, 784, 1024)
"""Numbers of patches that images of any shape have by default."""
_ENDINGS = {"csv": "table", "tsv": "table", "tar": "webdataset"}


@dataclass(frozen=True)
class Line:
    """A command line of open_clip_train; `line["--lr"]` is the flag's value, given or by default."""

    values: Mapping[str, Any]
    """Value of every flag; of one that the release lacks its default."""
    named: frozenset[str]
    """Flags that the command line gives."""
    gpus: int
    """World size: open_clip_train starts one rank for each GPU."""
    nodes: int = 1
    """Nodes that torchrun is told; they share the GPUs evenly."""
    release: str = RELEASES[0]
    """Release of open_clip_torch that the line is for, one of RELEASES."""

    def __getitem__(self, flag: str) -> Any:
        return self.values[flag]

    @property
    def format(self) -> str | None:
        """Format of the training data, as a value of data.format; see `format_of`."""
        return self.format_of("--train-data")

    def format_of(self, flag: str) -> str | None:
        """Returns the format of the data that the flag names; None if open_clip_train could not tell it."""
        if self["--dataset-type"] != "auto":
            return _FORMATS[self["--dataset-type"]]
        return _ENDINGS.get(str(self[flag] or "").rpartition(".")[2])

    @property
    def reads_tables(self) -> bool:
        """True if training or evaluation reads a table."""
        return any(self[flag] and self.format_of(flag) == "table" for flag in ("--train-data", "--val-data"))

    @property
    def reads_shards(self) -> bool:
        """True if training or evaluation reads shards."""
        return any(
            self[flag] and self.format_of(flag) == "webdataset" for flag in ("--train-data", "--val-data")
        )

    @property
    def uses_timm(self) -> bool:
        """True if timm's augmentation is asked for; images of any shape always have it."""
        return bool(self["--use-naflex"] or self["--aug-cfg"].get("use_timm"))

    @property
    def sources(self) -> list[str]:
        """Names in --train-data."""
        return self.split("--train-data")

    def split(self, flag: str) -> list[str]:
        """Returns the sources that the flag names; only shards have several."""
        text = self[flag]
        if not text:
            return []
        return text.split(SOURCES) if self.format_of(flag) == "webdataset" else [text]

    @property
    def naflex_batches(self) -> dict[int, tuple[float, int]]:
        """Numbers of patches of an image, with --use-naflex: how often a batch has it, and its samples.

        A GPU's batches have other samples for each, as many as --naflex-max-tokens-per-batch allows (its
        naflex_data.py). Raises InputError for what open_clip_train refuses.
        """
        if not self["--use-naflex"]:
            return {}
        lengths = self["--naflex-seq-lens"] or _PATCHES
        often = self["--naflex-seq-len-probs"] or [1.0] * len(lengths)
        divisor = self["--naflex-batch-divisor"]
        if (
            len(often) != len(lengths)
            or min(*often, *lengths) < 0
            or not sum(often)
            or min(divisor, *lengths) < 1
        ):
            raise InputError(
                "open_clip_train ends, too: --naflex-seq-lens and --naflex-batch-divisor are 1 or more, and "
                "--naflex-seq-len-probs has one number for each of the lengths, not all of them 0"
            )
        most = self["--naflex-max-tokens-per-batch"]
        return {
            length: (each, max(1, most // length // divisor * divisor))
            for length, each in sorted(dict(zip(lengths, often, strict=True)).items())
            if each
        }

    @property
    def batch_per_gpu(self) -> int:
        """Samples of a batch on one GPU, with --use-naflex the mean of its batches."""
        batches = self.naflex_batches.values()
        if not batches:
            return int(self["--batch-size"])
        return max(
            1, round(sum(often * size for often, size in batches) / sum(often for often, _ in batches))
        )

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all GPUs, accumulated batches included."""
        return int(self.batch_per_gpu * self["--accum-freq"] * self.gpus)

    @property
    def epoch_steps(self) -> int | None:
        """Optimizer steps that open_clip_train makes in one epoch; None if its data must be read for that.

        With shards it rounds up to whole batches, and to the same number for each loader process; then
        accumulation divides them (get_wds_dataset in its data.py, main in its main.py).
        """
        samples = self["--train-num-samples"]
        if samples is None or self.format != "webdataset" or self.global_batch < 1:
            return None
        workers = max(1, self["--workers"])
        batches = -(-samples // (self.batch_per_gpu * self.gpus))
        return int(-(-batches // workers) * workers // self["--accum-freq"])

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole training; None if the data must be read for that."""
        return None if self.epoch_steps is None else int(self.epoch_steps * self["--epochs"])

    @property
    def peak(self) -> tuple[float, int]:
        """Peak learning rate and warm-up steps of the same schedule here.

        A warm-up that is longer than the training becomes one that ends with it, on the same straight line: a
        job file refuses the longer one.
        """
        lr, warmup = self["--lr"], self["--warmup"]
        if self["--skip-scheduler"]:
            return lr, 0
        if self.steps and warmup > self.steps:
            return lr * self.steps / warmup, self.steps
        return lr, warmup

    @property
    def evaluated_every(self) -> int:
        """Epochs between two evaluations, so that each set has those that it asks for; 0: no set has any."""
        pairs = (("--val-data", "--val-frequency"), ("--imagenet-val", "--zeroshot-frequency"))
        return math.gcd(*(self[every] for data, every in pairs if self[data]))

    @property
    def is_distilled(self) -> bool:
        """True if a teacher model is named; open_clip_train needs both of its flags for one."""
        return self["--distill-model"] is not None and self["--distill-pretrained"] is not None

    @property
    def reports(self) -> str:
        """Names of the writers of metrics."""
        return "wandb,tensorboard" if "all" in self["--report-to"] else str(self["--report-to"])


def with_model_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with AdamW's settings that depend on the model (get_default_params in params.py)."""
    vit = "vit" in values["--model"].lower()
    defaults = {
        "--lr": 5e-4,
        "--beta1": 0.9,
        "--beta2": 0.98 if vit else 0.999,
        "--eps": 1e-6 if vit else 1e-8,
    }
    return values | {flag: value for flag, value in defaults.items() if values[flag] is None}


def is_table(name: str) -> bool:
    """Returns whether the ending is a table's, by which the job file tells tables from shards."""
    return row_of(name).name == "table"
