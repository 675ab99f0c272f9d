"""torch.compile for the blocks of a model.

The tests show which blocks these are, what they compute, and what a machine must have for it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from pydantic import ValidationError
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.support.check import problems
from tests.support.jobs import RESNET, VIT, few_words, tiny_job
from tests.support.steps import TrainStep, built, drawn, features, grads, micro_batches, train_step
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.model.compile import compile_blocks

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of torch's own tracing, others in each version

SAMPLES = 8
CLOSE = 1e-5
"""The norm of a difference in float32, against that of the gradient."""


@pytest.fixture
def kernels() -> Iterator[Any]:
    """torch's counts of what it compiled since the test began."""
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))  # type: ignore[no-any-return]


def gradients(job: Job, comm: Comm, *, compiled: bool) -> tuple[TrainStep, dict[str, Tensor]]:
    model = built(job, comm).model.train()
    if compiled:
        compile_blocks(model)
    step = train_step(job, comm, model)
    size = job.optim.max_batch_size_per_gpu
    step.gradients(micro_batches(*drawn(model, SAMPLES), int(size or SAMPLES)), step=0)
    return step, grads(model)


@pytest.mark.timeout(900)
def test_compiled_blocks_give_the_gradient_of_plain_ones_under_accumulation_and_dropout(
    alone: Comm, tmp_path: Path, kernels: Any
) -> None:
    config = json.loads(Path(few_words(VIT)).read_text())
    config["vision_cfg"]["patch_dropout"] = 0.5
    (tmp_path / "tiny-compiled-dropout.json").write_text(json.dumps(config))
    job = tiny_job(
        config=str(tmp_path / "tiny-compiled-dropout.json"),
        optim={"global_batch_size": SAMPLES, "max_batch_size_per_gpu": 4},
    )
    _, plain = gradients(job, alone, compiled=False)
    assert not kernels["stats"]
    step, fast = gradients(job, alone, compiled=True)
    assert list(fast) == list(plain)  # the names, too
    for name, wanted in plain.items():
        assert float((fast[name] - wanted).norm()) <= CLOSE * float(wanted.norm()), name
    made = kernels["stats"]["unique_graphs"]
    assert made == 4  # two towers, with a graph and without; the blocks of a tower share theirs
    step.model.eval()
    with torch.no_grad():
        features(step.model, torch.randn(3, 3, 32, 32), torch.ones(3, 16, dtype=torch.int64), "fp32")
    assert kernels["stats"]["unique_graphs"] == made  # an evaluation compiles nothing


def test_the_innermost_repeated_blocks_are_compiled() -> None:
    stages = nn.Sequential(nn.Sequential(Block(4), Block(4)), nn.Sequential(Block(4), Block(4), Block(4)))
    assert (
        compile_blocks(
            nn.ModuleDict({"stages": stages, "head": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))})
        ).blocks
        == 5
    )


def test_blocks_with_synchronised_batch_norm_are_left_alone_and_counted(tmp_path: Path) -> None:
    config = json.loads(Path(few_words(RESNET)).read_text())
    config["vision_cfg"]["layers"] = [2, 1, 1, 1]
    (tmp_path / "tiny-compiled-resnet.json").write_text(json.dumps(config))
    job = tiny_job(config=str(tmp_path / "tiny-compiled-resnet.json"))
    clip, _ = run_ranks(2, lambda comm: built(job, comm))
    said = "2 blocks, each at its first pass; 2 blocks with synchronised batch norm cannot be compiled"
    assert str(compile_blocks(clip.model)) == said


def test_a_machine_without_a_compiler_or_headers_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    said = problems(tiny_job(model={"compile": True}))
    assert "needs a C++ compiler (no-such-compiler -O1) and Python's headers" in said
    assert "g++ and python3-dev" in said
    assert problems(tiny_job()) == ""


@pytest.mark.parametrize("other", ["compile", "grad_checkpointing"])
def test_cuda_graphs_exclude_what_changes_a_pass(other: str) -> None:
    with pytest.raises(ValidationError, match=f"cuda_graphs = true excludes {other} = true"):
        tiny_job(model={"cuda_graphs": True, other: True})


def test_a_job_that_compiles_keeps_the_compiler_in_its_image() -> None:
    assert tiny_job(model={"compile": True}).compiler_in_image
    assert tiny_job(image={"compiler": True}).compiler_in_image
    assert not tiny_job().compiler_in_image
    with pytest.raises(ValidationError, match="is for numerical proofs"):
        tiny_job(model={"compile": True, "precision": "fp64"})
    with pytest.raises(ValidationError, match=r"image\.compiler = false"):
        tiny_job(model={"compile": True}, image={"compiler": False})
