"""The moving average of the weights: timm's is the oracle."""

from typing import Any

import pytest
import torch
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


def test_weights_come_back_if_the_evaluation_of_the_average_fails() -> None:
    model, _, ema = averaged(settings())
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match="in the evaluation"), ema.in_place():
        raise RuntimeError("in the evaluation")
    assert torch.equal(model.weight, before)
