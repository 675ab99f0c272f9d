"""Tests that need a GPU: NCCL, the gradient scaler, fused AdamW, memory layouts, kernels.

`make test-gpu` runs one rank on one GPU.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.test_comm import OF_THE_WORLDS_SIZE
from tests.integration.test_train import MANY_STEPS, assert_learns, assert_same_losses, run_of
from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.runs import TinyRun
from tests.support.start import start
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.model.build import build_model
from trainer.supervise.world import World
from trainer.train.step import MicroBatch, TrainStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

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


def train_step(job: Job, comm: Comm) -> TrainStep:
    batch_plan = plan(job, 1)
    network = build_model(job, batch_plan, comm).model.train()
    return TrainStep(job, batch_plan, comm, network)


def batch(job: Job, comm: Comm) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(job.optim.global_batch_size, 3, 32, 32, generator=generator)
    tokens = torch.randint(1, 1000, (job.optim.global_batch_size, 16), generator=generator)
    return MicroBatch(images.to(comm.device), tokens.to(comm.device))


def assert_cases_pass(backend: str, launcher: str) -> None:
    done = start(backend, launcher, 1, "tests.support.rank_cases", backend, *CASES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert tuple(re.findall(r"passed (\w+) on 1 ranks", done.stdout)) == CASES


def test_collectives_and_reducers_over_nccl() -> None:
    assert_cases_pass("torch", "clipship")


@pytest.mark.horovod
def test_collectives_and_reducers_over_horovod_with_nccl() -> None:
    if not horovod_with_nccl():
        pytest.skip(
            "Horovod was built without NCCL: give `make horovod` a CUDA toolkit of torch's CUDA version"
        )
    assert_cases_pass("horovod", "mpirun")


def test_the_backend_on_a_gpu_is_nccl(alone: Comm) -> None:
    assert (alone.name, alone.device.type) == ("torch (nccl)", "cuda")
    assert alone.versions()["nccl"] == ".".join(str(part) for part in torch.cuda.nccl.version())


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


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """The same run where no GPU is visible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return run_of(tmp_path_factory.mktemp("cpu"), "torch", 1)


def test_a_run_on_the_gpu_has_the_losses_of_one_on_the_cpu(tmp_path: Path, on_the_cpu: TinyRun) -> None:
    run = run_of(tmp_path, "torch", 1)
    (rank,) = json.loads((run.run / "environment.json").read_text())
    assert (rank["device"], rank["backend"]) == ("cuda:0", "torch (nccl)")
    assert_same_losses(run, on_the_cpu, rel=1e-2)


def test_compiled_blocks_have_the_losses_of_plain_ones(tmp_path: Path, on_the_cpu: TinyRun) -> None:
    assert_same_losses(run_of(tmp_path, "torch", 1, model={"compile": True}), on_the_cpu, rel=1e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_half_precision_learns_on_the_gpu(
    tmp_path: Path, on_the_cpu: TinyRun, precision: str
) -> None:
    assert_learns(
        run_of(tmp_path, "torch", 1, model={"precision": precision}, optim={"steps": MANY_STEPS}), on_the_cpu
    )
