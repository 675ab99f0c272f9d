"""The moving average of the weights: timm's is the oracle."""

from typing import Any

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from tests.support.jobs import tiny_job
from trainer.model.ema import Ema
from trainer.model.optimizer import build_optimizer

STEPS = 6
FINITE = torch.tensor(True)


def settings(**keys: Any) -> Any:
    return tiny_job(optim={"global_batch_size": 8, "steps": STEPS, "ema_decay": 0.7, **keys}).optim


def updated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def averaged(chosen: Any) -> tuple[nn.Linear, torch.optim.Optimizer, Ema]:
    """A layer, its optimizer and the average after two steps."""
    model = nn.Linear(8, 8)
    optimizer = build_optimizer(dict(model.named_parameters()), chosen)
    ema = Ema(optimizer, chosen)
    for step in (1, 2):
        updated(model, optimizer)
        ema.update(step, FINITE)
    return model, optimizer, ema


@pytest.mark.parametrize("from_step", [0, 1, 3])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_average_is_that_of_timm(name: str, from_step: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.LayerNorm(8)).double()
    chosen = settings(optimizer=name, ema_from_step=from_step, lr=0.1)
    optimizer = build_optimizer(dict(model.named_parameters()), chosen)
    ema, theirs = Ema(optimizer, chosen), ModelEmaV3(model, decay=0.7, update_after_step=from_step)
    for step in range(1, STEPS + 1):
        updated(model, optimizer)
        ema.update(step, torch.tensor(False))  # as in a step that is not finite
        ema.update(step, FINITE)
        theirs.update(model, step)
        with ema.in_place() as has_ema:
            assert has_ema
            torch.testing.assert_close(model.state_dict(), theirs.module.state_dict(), rtol=1e-13, atol=1e-14)


def test_weights_come_back_if_the_evaluation_of_the_average_fails() -> None:
    model, _, ema = averaged(settings())
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match="in the evaluation"), ema.in_place():
        raise RuntimeError("in the evaluation")
    assert torch.equal(model.weight, before)
