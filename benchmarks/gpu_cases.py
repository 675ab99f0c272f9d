"""Cases of `make bench-gpu`, and what fits a GPU. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainer.config import Job, Model
from trainer.estimate.architecture import Architecture, architecture
from trainer.estimate.fit import largest_micro_batch
from trainer.estimate.step_speed import training_flops
from trainer.model.catalog import read_config

_MULTIPLE = 8
OPEN_CLIP = "open_clip_train"


class Skipped(Exception):
    """Says why a case cannot be run here."""


@dataclass(frozen=True)
class GpuCase:
    """A model, its loss and the samples of a step on each GPU, fewer on one on which they do not fit."""

    model: str
    samples: int
    loss: str = "clip"
    precision: Literal["bf16", "fp32"] = "bf16"
    accumulation: int = 1
    """Micro-batches of a step; open_clip_train's `--accum-freq`."""
    caption_tokens: int | None = None
    """Mean tokens of captions of many lengths, as the web has them; None: all are as long as the context."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of [model] on our side."""
    changes: tuple[str, ...] = ()
    """Rows of `gpu_changes.CHANGES`, for which no key of a job file can ask."""
    backend: str = ""
    """Backend that trains on all GPUs of the machine; empty: one GPU trains alone."""
    against: str = ""
    """Trainer or case that its speed is compared with: open_clip_train, another case, or none."""
    steps: int = 30
    skip: int = 10
    """Steps that the kit times, and steps before them."""
    limit_s: int = 90
    """Seconds that the kit gives to the case."""

    @property
    def shape(self) -> Architecture:
        """Sizes of the model."""
        shape = architecture(Model(name=self.model))
        if shape is None:
            raise ValueError(f"the size of {self.model} is not known: is open_clip installed?")
        return shape

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the text tower knows."""
        return int(read_config(self.model)["text_cfg"].get("vocab_size", 49408))

    @property
    def flops(self) -> float:
        """Operations of products that training needs for one sample."""
        return training_flops(self.shape, self.job(self.samples, 1))

    def job(self, samples: int, steps: int, ranks: int = 1) -> Job:
        """The job of our side, with so many samples a rank, on synthetic data that is never read."""
        return Job.model_validate(
            {
                "name": "bench-step",
                "data": {"format": "synthetic", "synthetic_samples": ranks * samples * steps, "workers": 0},
                "model": {"name": self.model, "precision": self.precision, **self.keys},
                "optim": {
                    "global_batch_size": ranks * samples,
                    "max_batch_size_per_gpu": samples // self.accumulation,
                    "steps": steps,
                    "lr": 1e-4,
                    "loss": self.loss,
                },
                "comm": {"backend": self.backend or "torch"},
                "logging": {"every_steps": 10, "tensorboard": False},
                "health": {"preflight": False},
            }
        )


_WEB = 20
"""Mean tokens of a caption from the web."""
_B32, _B32_WEB = GpuCase("ViT-B-32", 1024), GpuCase("ViT-B-32", 1024, caption_tokens=_WEB)
_B16 = GpuCase("ViT-B-16", 512, steps=20, skip=8)
_L14 = GpuCase("ViT-L-14", 256, steps=15, skip=6)
_L14_LARGE = replace(_L14, samples=1024, accumulation=4, steps=6, skip=4)
_L14_336 = GpuCase("ViT-L-14-336", 64, steps=20, skip=8)
_SMALL = {
    name: GpuCase(model, 64, caption_tokens=_WEB, steps=100, skip=20)
    for name, model in (("B-32-small", "ViT-B-32"), ("L-14-small", "ViT-L-14"))
}
_BESIDE: Mapping[str, Any] = {"against": OPEN_CLIP, "limit_s": 150}
_COMPILED: Mapping[str, Any] = {"keys": {"compile": True}, "limit_s": 240}
_OVERHEAD: Mapping[str, Any] = {**_COMPILED, "changes": ("reduce-overhead",)}
_GRAPHS: Mapping[str, Any] = {"keys": {"cuda_graphs": True}}
_IMAGES = {"L-14": _L14, "B-16": _B16, "L-14-336": _L14_336}
"""Cases of images with 257, 197 and 577 tokens."""

GROUPS: dict[str, dict[str, GpuCase]] = {
    "whole": {
        "B-32": replace(_B32, **_BESIDE),
        "L-14": replace(_L14, **_BESIDE),
    },
    "blocks": {
        "B-32-compiled": replace(_B32, against="B-32", **_COMPILED),
        "B-32-overhead": replace(_B32, against="B-32", **_OVERHEAD),
        "L-14-large": _L14_LARGE,
        "L-14-large-compiled": replace(_L14_LARGE, against="L-14-large", **_COMPILED),
        # Graphs of torch.compile cannot replay micro-batches: one writes over the results of another.
        "L-14-overhead": replace(_L14, against="L-14", **_OVERHEAD),
        "B-32-captions": replace(_B32_WEB, **_BESIDE),
        "B-32-captions-compiled": replace(_B32_WEB, against="B-32-captions", **_COMPILED),
    },
    "small": {
        "B-32-small": replace(_SMALL["B-32-small"], **_BESIDE),
        "L-14-small": _SMALL["L-14-small"],
        **{
            f"{name}-{form}": replace(case, against=name, **fields)
            for name, case in _SMALL.items()
            for form, fields in (("graphs", _GRAPHS), ("compiled", _COMPILED), ("overhead", _OVERHEAD))
        },
    },
    "ranks": {
        f"{name}-{backend}": replace(case, backend=backend, against=name, limit_s=120)
        for name, case in (("B-32", _B32), ("L-14", _L14))
        for backend in ("torch", "fsdp", "horovod")
    },
    "attention": {
        "B-16": replace(_B16, **_BESIDE),
        "L-14-336": _L14_336,
        **{
            f"{name}-{family}": replace(case, changes=(family,), against=name)
            for name, case in _IMAGES.items()
            for family in ("long", "flash", "cudnn")
        },
        **{
            f"B-32-77-{family}": replace(_B32, changes=("unpacked", family), against="B-32")
            for family in ("one", "long", "flash", "cudnn")
        },
    },
    "packed": {
        "B-32-captions-varlen": replace(_B32_WEB, changes=("varlen",), against="B-32-captions"),
        "B-32-captions-unpacked": replace(_B32_WEB, changes=("unpacked",), against="B-32-captions"),
    },
    "more": {
        "SigLIP-B-16": GpuCase("ViT-B-16-SigLIP", 512, "siglip", steps=15, **_BESIDE),
        "B-32-accumulated": replace(_B32, accumulation=4, steps=10, **_BESIDE),
    },
}
"""Cases by the question that they answer: one more case is one more line."""
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}


def largest_batch(case: GpuCase, gpu_bytes: int) -> int:
    """Returns the case's samples, or as many as fit the GPU: a multiple of 8.

    Raises ValueError if none fit.
    """
    most = largest_micro_batch(case.shape, case.job(case.samples, 1), 1, gpu_bytes)
    samples = min(case.samples, (most - most % _MULTIPLE) * case.accumulation)
    if not samples:
        raise ValueError(f"{case.model} fits no GPU of {gpu_bytes / 2**30:.1f} GiB")
    return samples
