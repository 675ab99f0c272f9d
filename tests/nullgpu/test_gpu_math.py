"""TF32 and cuDNN's choice of algorithms are as the job says, whatever torch's own defaults are."""

from typing import Any

import pytest
import torch

from tests.support.jobs import RESNET, VIT, tiny_job
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan
from trainer.model.build import build_model


@pytest.mark.parametrize(
    ("precision", "tf32"), [("fp32", False), ("tf32", True), ("bf16", False), ("fp16", False)]
)
def test_only_tf32_rounds_the_factors_of_float32_products(gpu: Comm, precision: str, tf32: bool) -> None:
    job = tiny_job(model={"precision": precision})
    build_model(job, plan(job, 1), gpu)
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32


@pytest.mark.parametrize(
    ("config", "keys", "deterministic", "benchmark"),
    [
        (VIT, {}, False, False),
        (RESNET, {}, False, True),
        (RESNET, {"cudnn_benchmark": False}, False, False),
        (VIT, {"cudnn_benchmark": True}, False, True),
        (RESNET, {"cudnn_benchmark": True}, True, False),
    ],
)
def test_cudnn_times_its_algorithms_for_convolutional_towers_unless_told_otherwise(
    gpu: Comm, config: str, keys: dict[str, Any], deterministic: bool, benchmark: bool
) -> None:
    job = tiny_job(config=config, model=keys, comm={"deterministic": deterministic})
    build_model(job, plan(job, 1), gpu)
    assert torch.backends.cudnn.benchmark is benchmark
