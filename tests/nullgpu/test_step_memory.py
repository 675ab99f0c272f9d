"""The memory that `clipship check` computes is what torch's allocator gives out, for models of real size."""

import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.jobs import tiny_job
from tests.support.planned_steps import PlannedSteps
from trainer.comm.device import smallest_gpu_bytes
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.estimate.architecture import architecture
from trainer.estimate.fit import memory_of, with_micro_batch
from trainer.estimate.step_memory import step_memory

TOLERANCE = 0.1
RANKS = 8
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model, its samples in a step, and other keys of the job."""

    model: str
    samples: int
    model_keys: dict[str, Any] | None = None
    optim: dict[str, Any] | None = None
    fsdp: dict[str, Any] | None = None

    def __str__(self) -> str:
        keys = [key for keys in (self.model_keys, self.optim, self.fsdp) for key in (keys or {}).items()]
        return "-".join([self.model, str(self.samples), *(f"{name}={value}" for name, value in keys)])

    @property
    def job(self) -> Job:
        """The job of one rank, in bf16 unless the case says otherwise."""
        return tiny_job(
            config=self.model,
            model={"precision": "bf16", **(self.model_keys or {})},
            optim={"global_batch_size": self.samples, **(self.optim or {})},
        )

    @property
    def split(self) -> dict[str, Any]:
        """Sections of the job of eight ranks that split the model, each of which has the samples."""
        return {
            "config": self.model,
            "model": {"precision": "bf16", **(self.model_keys or {})},
            "optim": {"global_batch_size": RANKS * self.samples, **(self.optim or {})},
            "comm": {"backend": "fsdp", "fsdp": self.fsdp or {}},
        }


SIGLIP = {"loss": "siglip"}
CHECKPOINTED = {"grad_checkpointing": True}
LORA = {"init": "weights.pt", "lora_rank": 16}
CASES = (
    Case("ViT-B-32", 1024),
    Case("ViT-L-14", 256, CHECKPOINTED),
    Case("ViT-B-16-SigLIP", 256, optim=SIGLIP),
    Case("ViT-B-32", 1024, optim={"max_batch_size_per_gpu": 256}),
    Case("ViT-B-16", 256, {"patch_dropout": 0.5}),
    Case("ViT-B-32", 512, {"lock_image": True, "lock_image_unlocked_groups": 5}),
    Case("ViT-B-32-quickgelu", 512),
    Case("ViT-bigG-14", 64, CHECKPOINTED),
    Case("ViT-B-32", 512, {"precision": "fp32"}),
    Case("ViT-B-32", 512, {"lock_image": True, "lock_image_unlocked_groups": 1, "lock_text": True}),
    Case("ViT-B-16", 256, {"image_size": 288, "context_length": 32}),
    Case("ViT-B-32", 512, LORA | CHECKPOINTED),
)
MORE = (
    Case("ViT-H-14", 64),
    Case("ViT-S-32", 512),
    Case("ViT-B-16", 256),
    Case("ViT-B-16-plus-240", 256),
    Case("ViT-L-14", 256),
    Case("ViT-L-14-336", 64),
    Case("ViT-g-14", 64),
    Case("ViT-bigG-14", 32),
    Case("ViT-SO400M-14-SigLIP", 64, optim=SIGLIP),
    Case("ViT-B-32", 512, {"lock_image": True}),
    Case("ViT-B-32", 512, {"lock_text": True}),
    Case("ViT-L-14", 128, {"lock_image": True, "lock_image_unlocked_groups": 1, "lock_text": True}),
    Case("ViT-B-32", 512, LORA),
    Case("ViT-B-32", 512, {**LORA, "precision": "fp32"}),
    Case("ViT-B-32", 512, {**LORA, "lora_towers": "image", "lock_text": True}),
    Case("ViT-B-32", 512, LORA, optim={"max_batch_size_per_gpu": 128}),
)
"""Other sizes of models, and keys that do less than those above."""
WIDE = {"param_dtype": "fp32"}
KEPT = {"reshard_after_forward": False}
SPLIT = (
    Case("ViT-B-32", 512),
    Case("ViT-L-14", 64),
    Case("ViT-H-14", 16),
    Case("ViT-bigG-14", 16),
    Case("ViT-H-14", 64, CHECKPOINTED),
    Case("ViT-bigG-14", 64, CHECKPOINTED),
    Case("ViT-L-14", 64, {"kernels": "plain"}),
    Case("ViT-L-14", 64, optim={"max_batch_size_per_gpu": 16}),
    Case("ViT-H-14", 16, {"precision": "fp32"}),
    Case("ViT-L-14", 64, fsdp=WIDE),
    Case("ViT-H-14", 16, fsdp=WIDE),
    Case("ViT-H-14", 64, CHECKPOINTED, fsdp=WIDE),
    Case("ViT-H-14", 4, fsdp=KEPT),
    Case("ViT-H-14", 64, CHECKPOINTED, fsdp=KEPT),
    Case("ViT-L-14", 64, LORA),
)
"""Cases of eight ranks that split the model."""


@pytest.fixture
def _freed() -> None:
    """Gives the memory of earlier cases and tests back to the null GPU."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_freed")
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=str
)
def test_memory_by_arithmetic_is_that_of_the_allocator(case: Case, gpu: Comm) -> None:
    job, shape = case.job, architecture(case.job.model)
    assert shape is not None
    batch_plan = plan(job, 1)
    steps = PlannedSteps(job, batch_plan, shape, gpu)
    counted = shape.parameters + shape.adapters
    assert counted == pytest.approx(steps.parameters, abs=4), "logit scale and bias are left out"
    compare(case, step_memory(shape, job, batch_plan), steps.peak)


def compare(case: Case, computed: Any, peak: int) -> None:
    print(f"\n{case}: {peak / GIB:.2f} GiB, by arithmetic {computed.total / peak - 1:+.1%}: {computed}")
    assert computed.total == pytest.approx(peak, rel=TOLERANCE)


@pytest.fixture(scope="module")
def split_steps() -> dict[str, dict[str, Any]]:
    """What one rank of eight takes that split the model of a case."""
    jobs = json.dumps([case.split for case in SPLIT])
    command = [sys.executable, "-m", "tests.support.fsdp_state_rank", jobs]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(map(str, SPLIT), json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_memory_by_arithmetic_is_that_of_the_allocator_where_ranks_split_the_model(
    case: Case, split_steps: dict[str, dict[str, Any]]
) -> None:
    """The logit scale is whole on each rank."""
    job = tiny_job(**case.split)
    shape = architecture(job.model)
    assert shape is not None
    found = split_steps[str(case)]
    assert shape.parameters + shape.adapters == pytest.approx(found["parameters"], abs=4)
    compare(case, memory_of(shape, job, plan(job, RANKS)), found["step"])


def test_each_of_eight_ranks_trains_vit_bigg_in_less_than_ten_gib_of_state(
    split_steps: dict[str, dict[str, Any]],
) -> None:
    """Weights, gradients and both moments in float32 are 16 bytes a parameter: 37.8 GiB in all.

    The state is measured with the images of the step. While the model is split and while a checkpoint is put
    together, the device has a block or a part of the tensors whole, never all of them.
    """
    found = split_steps[str(Case("ViT-bigG-14", 64, CHECKPOINTED))]
    whole = 4 * found["parameters"]
    assert whole > 9 * GIB
    assert found["replaced"]["fused attention"] == 80, "the model is as training has it"
    assert found["state"] < 4 * whole / 8 + 0.25 * GIB, found
    assert found["splitting"] < whole / 8 + 0.5 * GIB, found
    assert found["step"] < 10 * GIB, found
    assert found["checkpoint"] < found["state"] + GIB, found
    assert found["waits"] == []


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
