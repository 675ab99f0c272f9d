"""Steps of models of real size on a null GPU, built as training builds them, whose memory a plan computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.data.pixels import normalised
from trainer.estimate.architecture import Architecture
from trainer.model import build
from trainer.train.step import MicroBatch, TrainStep


class NoTokenizer:
    """Takes the place of tokenizers that are fetched from a hub."""

    context_length = 64

    def __call__(self, texts: list[str]) -> Tensor:
        return torch.zeros(len(texts), self.context_length, dtype=torch.int64)


@contextmanager
def no_hub() -> Iterator[None]:
    """Lets models be built whose tokenizer a hub has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "text_source", lambda *_, **__: None)
        patch.setattr(build, "_tokenizer", lambda *_: NoTokenizer())
        patch.setattr(build, "quick", lambda tokenizer: tokenizer)
        yield


def built(job: Job, batch_plan: BatchPlan, comm: Comm, *, on_host: bool = False) -> build.Clip:
    """The job's model as training builds it, with faster modules.

    Nobody has written its weights, so that the host needs neither time nor memory for them.
    """
    with no_hub():
        return build.build_model(job, batch_plan, comm, initial_weights=False, on_host=on_host)


def loaded(batch_plan: BatchPlan, shape: Architecture) -> list[MicroBatch]:
    """One step's micro-batches on the GPU, as the prefetcher brings them."""
    n, mean, std = batch_plan.micro_batch_size, torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    return [
        MicroBatch(
            torch.empty(n, 4, *shape.image_size, dtype=torch.uint8, device="cuda"),
            torch.empty(n, shape.text.tokens, dtype=torch.int64, device="cuda"),
            normalise=lambda images: normalised(images, mean, std),
        )
        for _ in range(batch_plan.accumulation)
    ]


class PlannedSteps:
    """Two steps of a job, and the memory of the second one: the first makes the optimizer's state."""

    def __init__(self, job: Job, batch_plan: BatchPlan, shape: Architecture, comm: Comm, **keys: Any) -> None:
        clip = built(job, batch_plan, comm, **keys)
        model, self.replaced = clip.model, clip.kernels.replaced
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.train = TrainStep(job, batch_plan, comm, model)
        self.splitting = torch.cuda.max_memory_allocated()
        steps = [loaded(batch_plan, shape) for _ in range(2)]
        for number, batches in enumerate(steps):
            torch.cuda.reset_peak_memory_stats()
            self.train(batches, number)
        self.state, self.peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
