"""The identity of a run: its job, its model's config and tokenizer, and its data.

A checkpoint on disk and a step in memory both carry it, and a start or a restart compares it with its own
before it loads either. Imports no torch.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import require
from trainer.config import Job
from trainer.config.loader import recorded
from trainer.config.resume_rule import differences
from trainer.config.training import PREPROCESSING
from trainer.run.checkpoints import MODEL_CONFIG
from trainer.text.wording import many

_FACTS: Mapping[str, type] = {
    "job": dict, "data_samples": int, "data_files": str, "data_order": dict, "model_files": dict,
    "eval_files": dict, "anchor": dict, "stage_begin": int, "preprocessing": dict
}  # fmt: skip


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run, as one start of it finds it."""

    job: Job
    samples: int
    """Samples of an epoch."""
    model_files: Mapping[str, str] = field(default_factory=dict)
    """Digest of each small file by which the model is built, by name; empty if it has none."""
    data_files: str = ""
    """Digest of the sizes of the data's files and of their samples; empty if it is not known."""
    eval_files: Mapping[str, str] = field(default_factory=dict)
    """Digest of what each key of the evaluation reads from a file of the user's, by key."""
    anchor: Mapping[str, str] = field(default_factory=dict)
    """Digest of the weights that `optim.anchor` pulls to, by the key that names them; empty without it."""
    order: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the lanes in which samples come; empty until they are known."""
    begin: int = 0
    """Steps of the stages before this one, whose job this is."""
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    """Preprocessing of images by which the model is trained, by open_clip's names."""

    def facts(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the run."""
        return {
            "data_samples": self.samples,
            "data_files": self.data_files,
            "data_order": dict(self.order),
            "model_files": dict(self.model_files),
            "eval_files": dict(self.eval_files),
            "anchor": dict(self.anchor),
            "stage_begin": self.begin,
            "preprocessing": dict(self.preprocessing),
            "job": recorded(self.job),
        }

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """Returns what has changed since `facts` were written, so that this is another run."""
        if (begin := before["stage_begin"]) != self.begin:
            return [f"the stages before it had {many(begin, 'step')} there and have {self.begin:,} here"]
        return [
            *differences(*self._jobs_with_blocks(before)),
            *self._of_model(before),
            *self._of_data(before),
        ]

    def other_figures(self, before: Mapping[str, Any]) -> list[str]:
        """Returns what has changed since `facts` were written in what the evaluation reads.

        The run stays the same, but its figures from before and after do not compare.
        """
        return [
            f"{key} has other contents than then: the figures before and after do not compare"
            for key, digest in before["eval_files"].items()
            if self.eval_files.get(key, digest) != digest
        ]

    def _jobs_with_blocks(self, before: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the job then and now, with the run's blocks in both unless the job names others.

        What it named then, too, is nothing else: the key may have had no effect on the blocks.
        """
        then, now = dict(before["job"]), self.job.model_dump()
        chosen, named = before["data_order"]["block_samples"], then["data"].get("block_samples")
        then["data"] = {**then["data"], "block_samples": chosen}
        if now["data"]["block_samples"] in (None, named):
            now["data"]["block_samples"] = chosen
        return then, now

    def _of_model(self, before: Mapping[str, Any]) -> Iterator[str]:
        for name, digest in before["model_files"].items():
            if self.model_files.get(name, digest) != digest:
                what = "config" if name == MODEL_CONFIG else f"file {name}"
                yield f"the {what} of the model {self.job.model.name} has other contents than then"
        for key, value in before["preprocessing"].items():
            if self.preprocessing.get(key, value) != value:
                now = self.preprocessing[key]
                yield f"images were prepared with {PREPROCESSING[key]} = {value} then and with {now} now"
        for key, digest in before["anchor"].items():
            if self.anchor.get(key, digest) != digest:
                yield f"{key} has other weights than then, and optim.anchor pulls to them"

    def _of_data(self, before: Mapping[str, Any]) -> Iterator[str]:
        if before["data_samples"] != self.samples:
            yield f"data.train had {many(before['data_samples'], 'sample')} then and has {self.samples} now"
        elif self.data_files and before["data_files"] not in ("", self.data_files):
            scores = ", or data.scores other values," if self.job.data.scores else ""
            targets = ", or model.targets other features," if self.job.model.targets else ""
            changed = f"other sizes or other numbers of samples{scores}{targets}"
            yield f"the files of data.train have {changed} than then"


def check_facts(place: Path | str, manifest: Mapping[str, Any]) -> None:
    """Raises BrokenCheckpoint, which names the place, if a manifest lacks what `facts` returns."""
    require(place, manifest, _FACTS)
    require(place, manifest["job"], {"checkpoint": dict, "data": dict})
    require(place, manifest["data_order"], {"block_samples": int, "lanes": int})


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns a digest of each file's contents, by name."""
    return {name: _digest(content) for name, content in files.items()}


def digest_of(rows: Sequence[object]) -> str:
    """Returns a digest of rows of values whose text is the same in every process."""
    return _digest(repr(list(rows)).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
