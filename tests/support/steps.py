"""Models of jobs, and their steps on drawn samples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import small_job
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.config.learning_rate import learning_rate
from trainer.model.build import Clip, build_model, untrained
from trainer.model.fused_block import PLAIN
from trainer.model.optimizer import set_learning_rate
from trainer.model.outputs import features
from trainer.train.step import MicroBatch, TrainStep

__all__ = ["Clip", "MicroBatch", "TrainStep", "features", "untrained"]
SAMPLES = 16


def built(job: Job, comm: Any, **options: Any) -> Clip:
    """The job's model as the ranks of a world train it, with faster modules."""
    return build_model(job, plan(job, comm.world.size), comm, **options)


def train_step(job: Job, comm: Any, model: nn.Module, *teacher: Any) -> TrainStep:
    return TrainStep(job, plan(job, comm.world.size), comm, model, *teacher)


def step_of(job: Job, comm: Comm, **options: Any) -> TrainStep:
    return train_step(job, comm, built(job, comm, **options).model.train())


def accumulating(size: int, **sections: Any) -> Job:
    """`small_job` with micro-batches of so many samples."""
    return small_job(optim={"max_batch_size_per_gpu": size, **sections.pop("optim", {})}, **sections)


def with_model(job: Job, **keys: Any) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update=keys)})


def drawn(model: nn.Module, samples: int, *, seed: int = 1, length: int = 16) -> tuple[Tensor, Tensor]:
    """Images of the size and type that a model takes, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    side: Any = model.get_submodule("visual").image_size
    height, width = side if isinstance(side, tuple) else (side, side)
    dtype = next(model.parameters()).dtype
    images = torch.randn(samples, 3, height, width, generator=generator, dtype=dtype)
    return images, torch.randint(1, 1000, (samples, length), generator=generator)


def micro_batches(images: Tensor, tokens: Tensor, size: int) -> list[MicroBatch]:
    return [MicroBatch(i, t) for i, t in zip(images.split(size), tokens.split(size), strict=True)]


def batches_of(model: nn.Module, size: int = SAMPLES) -> list[MicroBatch]:
    """A global batch of SAMPLES in micro-batches of so many."""
    return micro_batches(*drawn(model, SAMPLES), size)


def set_rate(step: TrainStep, job: Job, number: int, steps: int) -> None:
    """Gives a step the learning rate that it has in a run of so many."""
    set_learning_rate(step.optimizer, learning_rate(job.optim, number, steps))


def grads(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a backward pass has left."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    return [name for name, tensor in model.state_dict().items() if not torch.equal(before[name], tensor)]


def fuse_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are fused by the plain form of what Triton computes."""
    monkeypatch.setattr("trainer.model.kernels.block_ops", lambda *_: (PLAIN, ""))


def weights_of(job: Job, path: Path) -> str:
    """Writes the weights with which a job begins; returns their path."""
    torch.save(untrained(job).model.state_dict(), path)
    return str(path)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether tensors have the same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
