"""CUDA graphs of the towers: the kernels of a step without them, in four launches and without a wait."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.null_gpu import DROPOUT, nullgpu
from tests.support.null_gpu_steps import RealStep
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.model.build import build_model
from trainer.model.outputs import features
from trainer.train.step import TrainStep

KERNELS = ("launches", "blas_calls", "cudnn_calls", "memsets", "graph_kernels")


def asked(step: RealStep) -> Any:
    """Returns what a step asks of the driver when it is warm."""
    for _ in range(3):
        step()
    with nullgpu.watch() as seen:
        step()
    assert seen.waits == [], seen.table()
    assert seen["mallocs"] == 0
    return seen


def test_replays_run_the_kernels_of_a_plain_step_in_few_launches(gpu: Comm) -> None:
    plain, graphs = (asked(RealStep(gpu, "ViT-B-32", 64, cuda_graphs=wanted)) for wanted in (False, True))
    assert plain["graph_launches"] == 0
    assert graphs["graph_launches"] == 4, "both passes of two towers"
    assert graphs["launches"] + graphs["blas_calls"] < 0.1 * (plain["launches"] + plain["blas_calls"])
    kernels = [sum(seen[name] for name in KERNELS) for seen in (plain, graphs)]
    assert kernels[1] == pytest.approx(kernels[0], abs=4), "inputs are copied to where the graphs read them"


def test_evaluation_and_inputs_of_another_shape_replay_nothing(gpu: Comm) -> None:
    step = RealStep(gpu, "ViT-B-32", 16, cuda_graphs=True)
    images = torch.zeros(16, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    tokens = torch.zeros(16, 77, device="cuda", dtype=torch.int64)

    def replayed(images: torch.Tensor, tokens: torch.Tensor) -> int:
        with nullgpu.watch() as seen:
            image, text, *_ = features(step.model, images, tokens, "bf16")
        assert len(image) == len(text) == len(images)
        return int(seen["graph_launches"])

    assert replayed(images, tokens) == 2
    assert replayed(images[:3], tokens[:3]) == 0
    with torch.no_grad():
        assert replayed(images, tokens) == 0
    step.model.eval()
    assert replayed(images, tokens) == 0


def test_a_locked_tower_is_not_captured(gpu: Comm) -> None:
    job = tiny_job(config=VIT, model={"precision": "bf16", "lock_image": True, "cuda_graphs": True})
    model = build_model(job, plan(job, 1), gpu).model.train()
    TrainStep(job, plan(job, 1), gpu, model)
    assert "encode_text" in vars(model)
    assert "encode_image" not in vars(model)


@pytest.mark.parametrize(
    ("config", "why"),
    [(RESNET, "has batch norm, which communicates"), (DROPOUT, "drops values or patches at random")],
)
def test_a_model_that_cannot_be_captured_is_refused(gpu: Comm, tmp_path: Path, config: Any, why: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    name = config if isinstance(config, str) else str(path)
    job = tiny_job(config=name, model={"cuda_graphs": True})
    model = build_model(job, plan(job, 1), gpu).model.train()
    with pytest.raises(InputError, match=rf"model.cuda_graphs: .* {why}: set it to false"):
        TrainStep(job, plan(job, 1), gpu, model)
