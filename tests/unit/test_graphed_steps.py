"""Steps whose passes are replayed are those of plain passes, to the last bit. Their graphs are the CPU's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cpu_graphs import CpuGraph, use_cpu_graphs
from tests.support.jobs import VIT, tiny_job
from tests.support.steps import MicroBatch, drawn, fuse_as_on_a_gpu, step_of
from trainer.comm.protocol import Comm
from trainer.model.packed_captions import Packed, pack

STEPS = 12
LENGTHS = (16, 8, 12)
"""Lengths to which captions are cut, in turns."""


def captions(samples: int, length: int, generator: torch.Generator, *, packs: bool) -> Tensor | Packed:
    """Returns captions of a length; packed ones are of several, whose sum is always the same."""
    tokens = torch.randint(1, 1000, (samples, length), generator=generator)
    if not packs:
        return tokens
    counted = torch.full((samples,), length - 2)
    counted[torch.randperm(samples, generator=generator)[:2]] += torch.tensor([2, -2])
    return pack(tokens, counted, torch.device("cpu"))


def trained(comm: Comm, model_keys: dict[str, Any], *, packs: bool = False, **sections: Any) -> list[Tensor]:
    """Returns the losses of all steps and all weights after them."""
    job = tiny_job(model=model_keys, **sections)
    step = step_of(job, comm)
    generator, losses = torch.Generator().manual_seed(1), []
    for number in range(STEPS):
        images, _ = drawn(step.model, job.optim.global_batch_size, seed=number)
        tokens = captions(len(images), LENGTHS[number % 3], generator, packs=packs)
        losses.append(step([MicroBatch(images, tokens)], number).loss_share)
    return [torch.stack(losses), *step.model.state_dict().values()]


@pytest.mark.parametrize(
    ("keys", "packs"),
    [
        ({"precision": "fp32"}, False),
        ({"precision": "bf16"}, False),
        ({"precision": "bf16"}, True),
        ({"precision": "bf16", "lock_image": True}, True),
    ],
    ids=["fp32", "bf16", "packed", "packed, a locked tower"],
)
def test_replayed_steps_are_plain_ones_to_the_last_bit(
    alone: Comm, keys: dict[str, Any], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clipped = {"grad_clip_norm": 0.1}
    if packs:  # as on a GPU, by the plain form of what Triton computes there
        fuse_as_on_a_gpu(monkeypatch)
    plain = trained(alone, keys, packs=packs, optim=clipped)
    use_cpu_graphs(monkeypatch)
    graphed = trained(alone, keys | {"cuda_graphs": True}, packs=packs, optim=clipped)
    # Images from the fourth step on, captions of each size from its fourth time on.
    towers = 1 if "lock_image" in keys else 2
    assert CpuGraph.replays == 2 * ((STEPS - 3) * (towers - 1) + STEPS - 3 * len(LENGTHS))
    for one, other in zip(graphed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(set(plain[0].tolist())) == STEPS


def test_a_gradient_that_is_a_part_of_another_is_clipped_once(
    alone: Comm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sample autograd gives timm's class token a piece of the gradient of the positions."""
    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 160}
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**json.loads(Path(VIT).read_text()), "vision_cfg": vision}))
    sections: dict[str, Any] = {
        "config": str(path),
        "optim": {"global_batch_size": 1, "grad_clip_norm": 1e-3, "loss": "siglip"},
    }
    plain = trained(alone, {}, **sections)
    use_cpu_graphs(monkeypatch)
    graphed = trained(alone, {"cuda_graphs": True}, **sections)
    for one, other in zip(graphed, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
