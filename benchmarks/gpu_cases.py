"""Cases of `make bench-gpu`, and what fits a GPU. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from trainer.config import Job, Model
from trainer.estimate.architecture import Architecture, architecture
from trainer.estimate.fit import largest_micro_batch
from trainer.estimate.step_speed import training_flops
from trainer.model.catalog import read_config

_MULTIPLE = 8


@dataclass(frozen=True)
class GpuCase:
    """A model, its loss and the samples of a step, fewer on a GPU on which they do not fit."""

    model: str
    samples: int
    loss: str = "clip"
    precision: Literal["bf16", "fp32"] = "bf16"
    accumulation: int = 1
    """Micro-batches of a step; open_clip_train's `--accum-freq`."""
    caption_tokens: int | None = None
    """Mean tokens of captions of many lengths, as the web has them; None: all are as long as the context."""
    cuda_graphs: bool = False
    """True if our side replays the towers as CUDA graphs; open_clip_train has none."""

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

    def job(self, samples: int, steps: int) -> Job:
        """The job of our side, of one rank on synthetic data that is never read."""
        return Job.model_validate(
            {
                "name": "bench-step",
                "data": {"format": "synthetic", "synthetic_samples": samples * steps, "workers": 0},
                "model": {
                    "name": self.model,
                    "precision": self.precision,
                    "cuda_graphs": self.cuda_graphs,
                },
                "optim": {
                    "global_batch_size": samples,
                    "max_batch_size_per_gpu": samples // self.accumulation,
                    "steps": steps,
                    "lr": 1e-4,
                    "loss": self.loss,
                },
                "logging": {"every_steps": 10, "tensorboard": False},
                "health": {"preflight": False},
            }
        )


CASES = {
    "B-32": GpuCase("ViT-B-32", 1024),
    "B-32-captions": GpuCase("ViT-B-32", 1024, caption_tokens=20),
    "B-32-small": GpuCase("ViT-B-32", 64, caption_tokens=20),
    "B-32-small-graphs": GpuCase("ViT-B-32", 64, caption_tokens=20, cuda_graphs=True),
    "L-14": GpuCase("ViT-L-14", 256),
    "B-32-accumulated": GpuCase("ViT-B-32", 1024, accumulation=4),
    "B-16": GpuCase("ViT-B-16", 512),
    "SigLIP-B-16": GpuCase("ViT-B-16-SigLIP", 512, "siglip"),
}


def largest_batch(case: GpuCase, gpu_bytes: int) -> int:
    """Returns the case's samples, or as many as fit the GPU: a multiple of 8.

    Raises ValueError if none fit.
    """
    most = largest_micro_batch(case.shape, case.job(case.samples, 1), 1, gpu_bytes)
    samples = min(case.samples, (most - most % _MULTIPLE) * case.accumulation)
    if not samples:
        raise ValueError(f"{case.model} fits no GPU of {gpu_bytes / 2**30:.1f} GiB")
    return samples
