"""Tests that need a GPU: NCCL, the gradient scaler, fused AdamW, memory layouts, kernels.

`make test-gpu` runs one rank on one GPU.
"""

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.integration.test_comm import OF_THE_WORLDS_SIZE, assert_pass
from tests.integration.test_train import MANY_STEPS, assert_learns, assert_same_losses, run_of
from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.runs import TinyRun
from tests.support.tiles import tiles_of
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.estimate.architecture import architecture
from trainer.estimate.step_memory import step_memory
from trainer.model.build import build_model
from trainer.model.host_compiler import missing_parts
from trainer.model.packed_captions import Packed, pack
from trainer.model.sync_batch_norm import synchronise_batch_norm
from trainer.model.tile_kernels import fused, problem_of
from trainer.train.step import MicroBatch, TrainStep
from trainer.world.launchers import World

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

REAL = "NULLGPU_LIBRARY" not in os.environ
"""False on a null GPU, whose kernels compute nothing; most tests then run up to their comparisons."""
computes = pytest.mark.computes

CASES = (*OF_THE_WORLDS_SIZE, "reducer_averages", "fixed_reducer_averages")


def horovod_with_nccl() -> bool:
    """Asked of another process: once imported, Horovod stays."""
    question = "import horovod.torch as hvd; print(bool(hvd.nccl_built()))"
    return (
        subprocess.run(
            [sys.executable, "-c", question], capture_output=True, text=True, check=False
        ).stdout.strip()
        == "True"
    )


@pytest.fixture
def alone() -> Iterator[Comm]:
    """A process group of one rank on the first GPU."""
    comm = connect(tiny_job(), World(0, 1, 0, 1, "here", "single process"), {})
    yield comm
    comm.close()


def gradient(job: Job, comm: Comm) -> Tensor:
    """The gradient of one step, of all weights; models of a job always begin with the same."""
    train = train_step(job, comm)
    train.gradients([batch(job, comm)], 0)
    return torch.cat(
        [parameter.grad.reshape(-1) for parameter in train.model.parameters() if parameter.grad is not None]
    )


def assert_near(one: Tensor, other: Tensor, share: float) -> None:
    """Compares by the norm of the difference, as a share of the other's."""
    assert one.shape == other.shape
    if REAL:
        error = float((one - other).norm() / other.norm())
        print(f"differs by {error:.1e}")
        assert error < share


def train_step(job: Job, comm: Comm) -> TrainStep:
    batch_plan = plan(job, 1)
    network = build_model(job, batch_plan, comm).model.train()
    return TrainStep(job, batch_plan, comm, network)


def batch(job: Job, comm: Comm) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(job.optim.global_batch_size, 3, 32, 32, generator=generator)
    images = images.to(torch.float64 if job.model.precision == "fp64" else torch.float32)
    tokens = torch.randint(1, 1000, (job.optim.global_batch_size, 16), generator=generator)
    return MicroBatch(images.to(comm.device), tokens.to(comm.device))


@computes
def test_collectives_and_reducers_over_nccl() -> None:
    assert_pass("torch", "clipship", 1, CASES)


@computes
@pytest.mark.horovod
def test_collectives_and_reducers_over_horovod_with_nccl() -> None:
    if not horovod_with_nccl():
        pytest.skip(
            "Horovod was built without NCCL: give `make horovod` a CUDA toolkit of torch's CUDA version"
        )
    assert_pass("horovod", "mpirun", 1, CASES)


def test_the_backend_on_a_gpu_is_nccl(alone: Comm) -> None:
    assert (alone.name, alone.device.type) == ("torch (nccl)", "cuda")
    assert alone.versions()["nccl"] == ".".join(str(part) for part in torch.cuda.nccl.version())


@computes
def test_adamw_is_fused_and_moves_every_parameter(alone: Comm) -> None:
    job = tiny_job()
    train = train_step(job, alone)
    assert train.optimizer.defaults["fused"]
    before = {name: parameter.detach().clone() for name, parameter in train.model.named_parameters()}
    train([batch(job, alone)], 0)
    still = [
        name for name, parameter in train.model.named_parameters() if torch.equal(parameter, before[name])
    ]
    assert still == []


@computes
def test_overflow_under_fp16_skips_the_step_and_halves_the_scale(alone: Comm) -> None:
    job = tiny_job(model={"name": VIT, "precision": "fp16"})
    train = train_step(job, alone)
    before, scale = train.model.state_dict()["logit_scale"].clone(), train.scaler.get_scale()
    good = batch(job, alone)
    train([MicroBatch(good.images * 1e30, good.tokens)], 0)
    assert train.scaler.get_scale() == scale / 2
    assert torch.equal(train.model.state_dict()["logit_scale"], before)


@pytest.mark.parametrize(("wanted", "found"), [(None, True), (False, False)])
def test_convolutional_towers_take_channels_last_unless_told_otherwise(
    alone: Comm, wanted: bool | None, found: bool
) -> None:
    job = tiny_job(model={"name": RESNET, "channels_last": wanted})
    weight = build_model(job, plan(job, 1), alone).model.get_parameter("visual.layer1.0.conv2.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) is found


@pytest.mark.parametrize(("precision", "share"), [("fp32", 1e-5), ("bf16", 5e-2), ("fp16", 1e-2)])
def test_fast_kernels_have_the_gradient_of_plain_ones(alone: Comm, precision: str, share: float) -> None:
    fast, plain = (
        gradient(tiny_job(model={"precision": precision, "kernels": kernels}), alone)
        for kernels in ("fast", "plain")
    )
    assert_near(fast, plain, share)


@pytest.mark.parametrize("kernels", ["fast", "plain"])
@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_loss_in_tiles_has_the_gradient_of_the_one_at_once(alone: Comm, loss: str, kernels: str) -> None:
    """Fused by torch.compile, and by single operations."""
    job = tiny_job(model={"kernels": kernels}, optim={"loss": loss})
    with tiles_of(3):
        tiled = gradient(job, alone)
    with tiles_of(0):
        whole = gradient(job, alone)
    assert_near(tiled, whole, 1e-5)


def test_the_trial_at_a_start_finds_no_fault_with_fused_tiles(alone: Comm) -> None:
    if missing_parts():
        pytest.skip(f"lacks {' and '.join(missing_parts())}")
    assert problem_of(fused(), alone.device) == ""


def test_tiles_in_tf32_are_near_those_in_float32(alone: Comm) -> None:
    """And not the same: the GPU has rounded."""
    with tiles_of(3):
        tf32, fp32 = (
            gradient(tiny_job(model={"precision": "bf16", "kernels": kernels}), alone)
            for kernels in ("fast", "plain")
        )
    assert_near(tf32, fp32, 5e-2)


def test_tf32_is_near_float32_and_not_the_same(alone: Comm) -> None:
    tf32, fp32 = (gradient(tiny_job(model={"precision": name}), alone) for name in ("tf32", "fp32"))
    assert_near(tf32, fp32, 1e-2)
    if REAL and torch.cuda.get_device_capability() >= (8, 0):
        assert not torch.equal(tf32, fp32)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_cuda_graphs_have_the_gradient_of_plain_passes_in_every_step(alone: Comm, precision: str) -> None:
    """Captions of two sizes take turns, packed where blocks are fused; each turn has others."""
    norms = []
    for graphs in (True, False):
        job = tiny_job(model={"precision": precision, "cuda_graphs": graphs})
        train, whole = train_step(job, alone), batch(job, alone)
        rows = whole.rows.cpu()
        turns = []
        for number in range(10):
            length = 16 if number % 2 else 8
            tokens: Tensor | Packed = rows.roll(number, 0)[:, :length].to(alone.device)
            if precision != "fp32":
                counted = torch.full((len(rows),), length - 2)
                counted[number % len(rows)] += 2
                tokens = pack(rows.roll(number, 0), counted, alone.device)
            turns.append(replace(whole, tokens=tokens))
        norms.append(torch.stack([train([turn], step).grad_norm for step, turn in enumerate(turns)]))
    assert_near(norms[0], norms[1], 2e-2)


def test_a_gradient_that_is_not_finite_changes_nothing_in_bf16(alone: Comm) -> None:
    job = tiny_job(model={"precision": "bf16"})
    train = train_step(job, alone)
    good = batch(job, alone)
    train([good], 0)
    before = {name: tensor.clone() for name, tensor in train.model.state_dict().items()}
    result = train([MicroBatch(good.images * math.nan, good.tokens)], 1)
    if REAL:
        assert not result.finite
        assert all(torch.equal(before[name], tensor) for name, tensor in train.model.state_dict().items())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm_by_the_kernels_of_several_ranks_is_that_of_one(
    alone: Comm, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    expected = nn.BatchNorm2d(4, device=alone.device)
    found = nn.Sequential(copy.deepcopy(expected))
    synchronise_batch_norm(found, alone)
    values = torch.randn(6, 4, 5, 5, device=alone.device).to(memory_format=layout)
    inputs = [values.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    towards = torch.randn_like(inputs[0])
    results = [norm(x) for norm, x in zip((expected, found), inputs, strict=True)]
    for result in results:
        result.backward(towards)
    assert_near(results[1], results[0], 1e-5)
    gradients = [x.grad for x in inputs]
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert_near(gradients[1], gradients[0], 1e-4)
    for one, other in zip(found[0].buffers(), expected.buffers(), strict=True):
        assert_near(one.float(), other.float(), 1e-5)


@pytest.mark.parametrize(("name", "samples"), [("ViT-B-32", 128), ("ViT-B-16", 32)])
def test_peak_memory_is_near_what_check_reckons(alone: Comm, name: str, samples: int) -> None:
    """Beside the images, which a loader would bring; a GPU's libraries take workspaces of their own."""
    job = tiny_job(config=name, model={"precision": "bf16"}, optim={"global_batch_size": samples})
    train = train_step(job, alone)
    images = torch.randn(samples, 3, 224, 224, device=alone.device)
    tokens = torch.randint(1, 1000, (samples, 77), device=alone.device)
    for step in range(2):
        torch.cuda.reset_peak_memory_stats()
        train([MicroBatch(images, tokens)], step)
    shape = architecture(job.model)
    assert shape is not None
    reckoned = step_memory(shape, job, plan(job, 1))
    expected = reckoned.total - reckoned.images + images.nbytes
    assert torch.cuda.max_memory_allocated() == pytest.approx(expected, rel=0.1)


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """The same run where no GPU is visible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return run_of(tmp_path_factory.mktemp("cpu"), "torch", 1)


@computes
def test_a_run_on_the_gpu_has_the_losses_of_one_on_the_cpu(tmp_path: Path, on_the_cpu: TinyRun) -> None:
    run = run_of(tmp_path, "torch", 1)
    (rank,) = json.loads((run.run / "environment.json").read_text())
    assert (rank["device"], rank["backend"]) == ("cuda:0", "torch (nccl)")
    assert_same_losses(run, on_the_cpu, rel=1e-2)


@computes
def test_compiled_blocks_have_the_losses_of_plain_ones(tmp_path: Path, on_the_cpu: TinyRun) -> None:
    assert_same_losses(run_of(tmp_path, "torch", 1, model={"compile": True}), on_the_cpu, rel=1e-2)


@computes
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_half_precision_learns_on_the_gpu(
    tmp_path: Path, on_the_cpu: TinyRun, precision: str
) -> None:
    assert_learns(
        run_of(tmp_path, "torch", 1, model={"precision": precision}, optim={"steps": MANY_STEPS}), on_the_cpu
    )
