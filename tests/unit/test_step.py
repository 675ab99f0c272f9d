"""One optimizer step in one process.

The subjects: accumulation, randomness, precision, clipping, locked towers, batch norm.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.jobs import COCA, RESNET, VIT, small_job
from tests.support.steps import (
    SAMPLES,
    accumulating,
    batches_of,
    state_of,
    step_of,
    train_step,
    untrained,
)
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.errors import InputError


def _config(path: Path, vision: dict[str, Any]) -> str:
    """Writes the config of the tiny ViT with another image tower; returns its path."""
    path.write_text(json.dumps({**json.loads(Path(VIT).read_text()), "vision_cfg": vision}))
    return str(path)


def _of_timm(name: str, pool: str = "avg") -> dict[str, Any]:
    return {"timm_model_name": name, "timm_model_pretrained": False, "timm_pool": pool, "image_size": 64}


def test_batch_norm_with_accumulation_is_refused(alone: Comm) -> None:
    with pytest.raises(InputError, match=r"batch norm.*4 micro-batches"):
        step_of(accumulating(4, config=RESNET), alone)


def test_a_model_and_a_loss_that_do_not_fit_are_refused_wherever_the_config_was(alone: Comm) -> None:
    with pytest.raises(InputError, match=r"tiny-coca\.json also writes captions \(CoCa\)"):
        step_of(small_job(config=COCA), alone)
    with pytest.raises(InputError, match=r"tiny-vit\.json writes no captions"):
        step_of(small_job(optim={"loss": "coca"}), alone)


@pytest.fixture
def timm_model(tmp_path: Path) -> str:
    """A convolutional tower of timm's, whose batch norm has the activation in it."""
    return _config(tmp_path / "tiny-timm.json", _of_timm("test_efficientnet"))


def test_activations_that_are_recomputed_move_no_statistics_of_batch_norm(
    alone: Comm, timm_model: str
) -> None:
    states = []
    for recompute in (False, True):
        step = step_of(small_job(config=timm_model, model={"grad_checkpointing": recompute}), alone)
        step(batches_of(step.model, SAMPLES), 0)
        states.append(state_of(step.model))
    assert [name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name])] == []
    assert {int(tensor) for name, tensor in states[1].items() if "num_batches" in name} == {1}


def test_ranks_with_statistics_of_their_own_go_on_with_the_mean_of_them() -> None:
    """Otherwise each would evaluate and save another model, and the ranks' state would differ."""
    job = small_job(config=RESNET, model={"sync_batch_norm": False})

    def rank_main(comm: Any) -> tuple[dict[str, Tensor], Tensor]:
        model = models[comm.world.rank]
        step = train_step(job, comm, model)
        own_batch = [batches_of(model, SAMPLES // 2)[comm.world.rank]]
        step.gradients(own_batch, 0)
        own = model.get_buffer("visual.bn1.running_var").clone()
        model.load_state_dict(first)
        step(own_batch, 0)
        return state_of(model), own

    models = [untrained(job).model.train() for _ in range(2)]
    first = state_of(models[0])
    (state, own), (other_state, other) = run_ranks(2, rank_main)
    assert not torch.equal(own, other)
    torch.testing.assert_close(state["visual.bn1.running_var"], (own + other) / 2)
    assert [name for name, tensor in state.items() if not torch.equal(tensor, other_state[name])] == []
