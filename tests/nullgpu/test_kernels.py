"""A step of a large model moves less memory, in fewer launches, than one of open_clip's own modules."""

from typing import Any

import open_clip
import pytest
import torch

from tests.support.jobs import tiny_job
from tests.support.null_gpu import nullgpu
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan
from trainer.model.kernels import use_kernels
from trainer.train.step import MicroBatch, TrainStep

WARM_STEPS = 2


class Measured:
    """Figures of one step in bf16 on whole captions."""

    def __init__(self, comm: Comm, name: str, samples: int, **model_keys: Any) -> None:
        job = tiny_job(
            data={"synthetic_samples": samples},
            model={"name": name, "precision": "bf16", **model_keys},
            optim={"global_batch_size": samples},
        )
        with torch.device("cuda"):  # weights made on the host would take the test's time
            model = open_clip.create_model(name, device="cuda", output_dict=False).train()
        if job.model.grad_checkpointing:
            model.set_grad_checkpointing(True)
        use_kernels(model, job.model)
        step = TrainStep(job, plan(job, 1), comm, model)
        side = model.visual.image_size[0]
        images = torch.empty(samples, 3, side, side, dtype=torch.bfloat16, device="cuda")
        tokens = torch.empty(samples, model.context_length, dtype=torch.int64, device="cuda")
        batch = [MicroBatch(images, tokens)]
        for number in range(WARM_STEPS):
            step(batch, number)
        torch.cuda.reset_peak_memory_stats()
        with nullgpu.watch() as seen:
            step(batch, WARM_STEPS)
        self.peak_gib, self.launches, self.waits = nullgpu.peak_gib(), seen["launches"], seen.waits
        with nullgpu.bytes_moved() as traffic:
            step(batch, WARM_STEPS + 1)
        self.moved_gib = traffic.bytes / 2**30


@pytest.mark.parametrize(
    ("name", "samples", "keys", "moved_gib", "peak_gib", "launches"),
    [
        ("ViT-B-32", 1024, {}, 280, 36.1, 1432),
        ("ViT-L-14", 256, {}, 550, 67.3, 2102),
        ("ViT-L-14", 256, {"grad_checkpointing": True}, 920, 11.7, 2774),
    ],
)
def test_a_step_stays_below_what_open_clip_train_takes(
    gpu: Comm, name: str, samples: int, keys: dict[str, Any], moved_gib: float, peak_gib: float, launches: int
) -> None:
    """The peak and the launches are those of open_clip_train, of which a step makes at most four fifths."""
    got = Measured(gpu, name, samples, **keys)
    assert got.waits == []
    assert got.moved_gib <= moved_gib
    assert got.peak_gib < peak_gib
    assert got.launches <= 0.8 * launches


def test_a_model_with_quickgelu_takes_a_fifth_less_memory_and_two_fifths_less_traffic(gpu: Comm) -> None:
    plain, fast = (Measured(gpu, "ViT-B-32-quickgelu", 512, kernels=kernels) for kernels in ("plain", "fast"))
    assert fast.waits == []
    assert fast.moved_gib <= 0.62 * plain.moved_gib
    assert fast.peak_gib <= 0.81 * plain.peak_gib
    assert fast.launches <= 0.5 * plain.launches
