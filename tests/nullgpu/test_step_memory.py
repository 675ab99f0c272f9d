"""The memory that `clipship check` computes is what torch's allocator gives out, for models of real size."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.jobs import tiny_job
from trainer.comm.gpu_memory import smallest_gpu_bytes
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, plan
from trainer.data.pixels import normalised
from trainer.model import build
from trainer.model.architecture import Architecture, architecture
from trainer.model.fit import with_micro_batch
from trainer.model.step_memory import step_memory
from trainer.train.step import MicroBatch, TrainStep

TOLERANCE = 0.1


@dataclass(frozen=True)
class Case:
    """A model, its samples in a step, and other keys of the job."""

    model: str
    samples: int
    model_keys: dict[str, Any] | None = None
    optim: dict[str, Any] | None = None

    def __str__(self) -> str:
        keys = (*(self.model_keys or {}).items(), *(self.optim or {}).items())
        return "-".join([self.model, str(self.samples), *(f"{name}={value}" for name, value in keys)])

    @property
    def job(self) -> Job:
        """The job of one rank, in bf16 unless the case says otherwise."""
        return tiny_job(
            config=self.model,
            model={"precision": "bf16", **(self.model_keys or {})},
            optim={"global_batch_size": self.samples, **(self.optim or {})},
        )


SIGLIP = {"loss": "siglip"}
CHECKPOINTED = {"grad_checkpointing": True}
OFTEN = (
    Case("ViT-B-32", 1024),
    Case("ViT-L-14", 256, CHECKPOINTED),
    Case("ViT-B-16-SigLIP", 256, optim=SIGLIP),
    Case("ViT-B-32", 1024, optim={"max_batch_size_per_gpu": 256}),
    Case("ViT-B-16", 256, {"patch_dropout": 0.5}),
    Case("ViT-B-32", 512, {"lock_image": True, "lock_image_unlocked_groups": 5}),
    Case("ViT-H-14", 64),
    Case("ViT-B-32-quickgelu", 512),
)
"""Cases that CI runs; `make test-nullgpu TEST_ARGS='-m full'` runs the others."""
OTHERS = (
    Case("ViT-S-32", 512),
    Case("ViT-B-16", 256),
    Case("ViT-B-16-plus-240", 256),
    Case("ViT-L-14", 256),
    Case("ViT-L-14-336", 64),
    Case("ViT-g-14", 64),
    Case("ViT-bigG-14", 32),
    Case("ViT-SO400M-14-SigLIP", 64, optim=SIGLIP),
    Case("ViT-bigG-14", 64, CHECKPOINTED),
    Case("ViT-B-32", 512, {"precision": "fp32"}),
    Case("ViT-B-32", 512, {"lock_image": True}),
    Case("ViT-B-32", 512, {"lock_text": True}),
    Case("ViT-B-32", 512, {"lock_image": True, "lock_image_unlocked_groups": 1, "lock_text": True}),
    Case("ViT-L-14", 128, {"lock_image": True, "lock_image_unlocked_groups": 1, "lock_text": True}),
    Case("ViT-B-16", 256, {"image_size": 288, "context_length": 32}),
)


class NoTokenizer:
    """Takes the place of tokenizers that are fetched from a hub."""

    context_length = 64

    def __call__(self, texts: list[str]) -> Tensor:
        return torch.zeros(len(texts), self.context_length, dtype=torch.int64)


@pytest.fixture
def _built_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the null GPU draw the weights, which costs nothing there."""
    plain = build.untrained

    def untrained(job: Job, **keys: Any) -> build.Clip:
        with torch.device("cuda"):
            return plain(job, **keys)

    monkeypatch.setattr(build, "untrained", untrained)
    monkeypatch.setattr(build, "text_source", lambda *_, **__: None)  # a hub has SigLIP's tokenizer
    monkeypatch.setattr(build, "_tokenizer", lambda *_: NoTokenizer())
    monkeypatch.setattr(build, "quick", lambda tokenizer: tokenizer)
    monkeypatch.setattr(Tensor, "erfinv_", lambda tensor: tensor)  # torch compiles it for the GPU at run time
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_built_on_the_gpu")
@pytest.mark.parametrize(
    "case", [*OFTEN, *(pytest.param(case, marks=pytest.mark.full) for case in OTHERS)], ids=str
)
def test_memory_by_arithmetic_is_that_of_the_allocator(case: Case, gpu: Comm) -> None:
    job, shape = case.job, architecture(case.job.model)
    assert shape is not None
    batch_plan = plan(job, 1)
    parameters, peak = measured(job, batch_plan, shape, gpu)
    assert shape.parameters == pytest.approx(parameters, abs=4), "the logit scale and bias are left out"
    computed = step_memory(shape, job, batch_plan)
    print(
        f"\n{case.model}: {peak / 2**30:.2f} GiB, by arithmetic {computed.total / peak - 1:+.1%}: {computed}"
    )
    assert computed.total == pytest.approx(peak, rel=TOLERANCE)


def measured(job: Job, batch_plan: BatchPlan, shape: Architecture, gpu: Comm) -> tuple[int, int]:
    """Returns the number of parameters, and the peak bytes of the second step."""
    clip = build.build_model(job, batch_plan, gpu)
    step = TrainStep(job, batch_plan, gpu, clip.model)
    steps = [loaded(batch_plan, shape) for _ in range(2)]
    step(steps[0], 0)
    torch.cuda.reset_peak_memory_stats()
    step(steps[1], 1)
    return sum(each.numel() for each in clip.model.parameters()), torch.cuda.max_memory_allocated()


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


def test_auto_goes_by_the_memory_of_the_gpu(gpu: Comm) -> None:
    """The null GPU has as many bytes as the run gave it."""
    job = tiny_job(
        config="ViT-L-14",
        model={"precision": "bf16"},
        optim={"global_batch_size": 4096, "max_batch_size_per_gpu": "auto"},
    )
    found = smallest_gpu_bytes(gpu)
    assert found == torch.cuda.get_device_properties(0).total_memory
    most = with_micro_batch(job, 1, found).optim.max_batch_size_per_gpu
    assert isinstance(most, int)
    assert plan(with_micro_batch(job, 1, found), 1).micro_batch_size <= most < 4096
