"""A step of a large model moves less memory, in fewer launches, than one of open_clip's own modules."""

from typing import Any

import pytest

from tests.support.null_gpu_steps import Measured
from trainer.comm.protocol import Comm


@pytest.mark.parametrize(
    ("name", "samples", "keys", "moved_gib", "peak_gib", "launches"),
    [
        ("ViT-B-32", 1024, {}, 200, 36.1, 1432),
        ("ViT-L-14", 256, {}, 360, 67.3, 2102),
        ("ViT-L-14", 256, {"grad_checkpointing": True}, 480, 11.7, 2774),
        ("ViT-B-32", 1024, {"micro_batch": 256}, 300, 11.6, 8354),
    ],
)
def test_a_step_stays_below_what_open_clip_train_takes(
    gpu: Comm, name: str, samples: int, keys: dict[str, Any], moved_gib: float, peak_gib: float, launches: int
) -> None:
    """Peak and launches are those of open_clip_train; a step makes at most 0.42 of these launches."""
    got = Measured(gpu, name, samples, **keys)
    assert got.waits == []
    assert got.moved_gib <= moved_gib
    assert got.peak_gib < peak_gib
    assert got.launches <= 0.42 * launches


def test_a_model_with_quickgelu_takes_a_fifth_less_memory_and_two_fifths_less_traffic(gpu: Comm) -> None:
    plain, fast = (Measured(gpu, "ViT-B-32-quickgelu", 512, kernels=kernels) for kernels in ("plain", "fast"))
    assert fast.waits == []
    assert fast.moved_gib <= 0.62 * plain.moved_gib
    assert fast.peak_gib <= 0.81 * plain.peak_gib
    assert fast.launches <= 0.5 * plain.launches


def test_micro_batches_move_little_more_than_the_whole_batch_and_its_second_forward_pass(gpu: Comm) -> None:
    whole = Measured(gpu, "ViT-B-32", 1024)
    micro = Measured(gpu, "ViT-B-32", 1024, micro_batch=256)
    assert micro.waits == []
    assert micro.moved_gib - micro.forward_gib <= 1.15 * whole.moved_gib
