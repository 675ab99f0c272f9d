"""Steps whose passes are replayed are those of plain passes, to the last bit. Their graphs are the CPU's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cpu_graphs import CpuGraph, use_cpu_graphs
from tests.support.jobs import RESNET, VIT, tiny_job
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan
from trainer.model.build import build_model
from trainer.model.cuda_graphs import could_be_replayed
from trainer.train.step import MicroBatch, TrainStep

STEPS = 12
LENGTHS = (16, 8, 12)
"""Lengths to which captions are cut, in turns."""


def trained(comm: Comm, precision: str, *, graphs: bool, **keys: object) -> list[Tensor]:
    """Returns the losses of all steps, and all weights after them."""
    job = tiny_job(model={"precision": precision, "cuda_graphs": graphs, **keys})
    batch_plan = plan(job, 1)
    model = build_model(job, batch_plan, comm).model.train()
    step = TrainStep(job, batch_plan, comm, model)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for number in range(STEPS):
        images = torch.randn(job.optim.global_batch_size, 3, 32, 32, generator=generator)
        tokens = torch.randint(1, 1000, (len(images), LENGTHS[number % 3]), generator=generator)
        losses.append(step([MicroBatch(images, tokens)], number).loss_share)
    return [torch.stack(losses), *model.state_dict().values()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("keys", [{}, {"lock_image": True}], ids=["both towers", "a locked tower"])
def test_replayed_steps_are_plain_ones_to_the_last_bit(
    alone: Comm, precision: str, keys: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(alone, precision, graphs=False, **keys)
    use_cpu_graphs(monkeypatch)
    graphed = trained(alone, precision, graphs=True, **keys)
    # Images from the fourth step on, captions of each length from its fourth time on.
    towers = 1 if keys else 2
    assert CpuGraph.replays == 2 * ((STEPS - 3) * (towers - 1) + STEPS - 3 * len(LENGTHS))
    for one, other in zip(graphed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(set(plain[0].tolist())) == STEPS


@pytest.mark.parametrize(
    ("config", "keys", "could"),
    [
        (VIT, {}, True),
        (VIT, {"model": {"cuda_graphs": True}}, False),
        (VIT, {"model": {"grad_checkpointing": True}}, False),
        (VIT, {"optim": {"max_batch_size_per_gpu": 2}}, False),
        (VIT, {"comm": {"backend": "fsdp"}}, False),
        (RESNET, {}, False),
    ],
)
def test_a_job_could_ask_for_graphs_where_nothing_excludes_them(
    config: str, keys: dict[str, Any], could: bool, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(config=config, **keys)
    model = build_model(job, plan(job, 1), alone).model
    assert not could_be_replayed(model, job, 1, alone.device), "this is no GPU"
    use_cpu_graphs(monkeypatch)
    assert could_be_replayed(model, job, 1, alone.device) == could
