"""CUDA graphs of the towers: the kernels of a step without them, in four launches and without a wait."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.null_gpu import DROPOUT
from tests.support.null_gpu_steps import RealStep
from tools import nullgpu
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.model.build import build_model
from trainer.model.outputs import features
from trainer.model.packed_captions import Packed, pack
from trainer.train.step import TrainStep

KERNELS = ("launches", "blas_calls", "cudnn_calls", "memsets", "graph_kernels")
WARM_STEPS = 5
"""Steps after which what has come each time is captured, and a step has run with it."""


def asked(step: RealStep, captions: Packed | None = None) -> Any:
    """Returns what a warm step asks of the driver."""
    with nullgpu.watch() as seen:
        step(captions)
    assert seen.waits == [], seen.table()
    assert seen["mallocs"] == 0
    return seen


def warm(step: RealStep, captions: Packed | None = None) -> RealStep:
    for _ in range(WARM_STEPS):
        step(captions)
    return step


def packed(samples: int, tokens: int) -> Packed:
    """Returns captions of as many tokens each, laid end to end."""
    ids = torch.ones(samples, 77, dtype=torch.int64)
    return pack(ids, torch.full((samples,), tokens), torch.device("cuda"))


def test_replays_run_the_kernels_of_a_plain_step_in_few_launches(gpu: Comm) -> None:
    steps = (warm(RealStep(gpu, "ViT-B-32", 64, cuda_graphs=wanted)) for wanted in (False, True))
    plain, graphs = map(asked, steps)
    assert plain["graph_launches"] == 0
    assert graphs["graph_launches"] == 4, "both passes of two towers"
    asked_for = [seen["launches"] + seen["blas_calls"] for seen in (plain, graphs)]
    assert asked_for[1] < asked_for[0] / 8, "the loss and the optimizer alone"
    kernels = [sum(seen[name] for name in KERNELS) for seen in (plain, graphs)]
    assert kernels[1] == pytest.approx(kernels[0], abs=4), "inputs are copied to where the graphs read them"


def test_packed_captions_are_replayed_by_the_number_of_their_tokens(
    gpu: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    """Four numbers at most: a fifth one runs as before."""
    caplog.set_level(logging.INFO, "clipship")
    step = RealStep(gpu, "ViT-B-32", 16, cuda_graphs=True)
    captions = [packed(16, tokens) for tokens in (8, 12, 16, 20, 24)]
    for each in captions:
        warm(step, each)
    assert [asked(step, each)["graph_launches"] for each in captions] == [4, 4, 4, 4, 2]
    texts = [record.getMessage() for record in caplog.records if "text tower" in record.getMessage()]
    sizes = [text.rpartition(" of ")[2] for text in texts]
    assert sizes == ["128 tokens", "192 tokens", "256 tokens", "320 tokens"]
    places = set()
    for each in captions[:4]:
        step(each)
        places.add(step.model.token_embedding.weight.grad.data_ptr())
    assert len(places) == 1, "gradients of all sizes lie in one place"


def test_captions_that_run_plain_find_room_beside_the_graphs(gpu: Comm) -> None:
    """Largest last: what the first steps have taken for it was given back to capture the others."""
    torch.cuda.empty_cache()
    step = RealStep(gpu, "ViT-B-32", 128, cuda_graphs=True)
    for _ in range(2):
        step(packed(128, 77))
    for tokens in (20, 24, 28, 32):
        warm(step, packed(128, tokens))
    captured = torch.cuda.memory_reserved()
    for tokens in (40, 60, 76, 77):
        step(packed(128, tokens))
    assert torch.cuda.memory_reserved() <= 1.01 * captured


def test_evaluation_and_inputs_of_another_shape_replay_nothing(gpu: Comm) -> None:
    step = warm(RealStep(gpu, "ViT-B-32", 16, cuda_graphs=True))
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
    captured = [name.lstrip("_") for name in vars(model) if "encode_" in name]
    assert captured == ["encode_text"]


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
