"""The moving average of the weights: timm's is the oracle."""

import math
from typing import Any

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from trainer.checkpoint.state import EMA
from trainer.config import Optim
from trainer.model.ema import Ema
from trainer.model.optimizer import build_optimizer

STEPS = 6
FINITE = torch.tensor(True)


def settings(**keys: Any) -> Optim:
    return Optim.model_validate({"global_batch_size": 8, "steps": STEPS, "ema_decay": 0.7, **keys})


def updated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("from_step", [0, 1, 3])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_average_is_that_of_timm(name: str, from_step: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).double()
    chosen = settings(optimizer=name, ema_from_step=from_step, lr=0.1)
    optimizer = build_optimizer(dict(model.named_parameters()), chosen)
    ema, theirs = Ema(optimizer, chosen), ModelEmaV3(model, decay=0.7, update_after_step=from_step)
    for step in range(1, STEPS + 1):
        updated(model, optimizer)
        ema.update(step, FINITE)
        theirs.update(model, step)
        with ema.in_place() as has_ema:
            assert has_ema
            torch.testing.assert_close(model.state_dict(), theirs.module.state_dict(), rtol=1e-13, atol=1e-14)


def test_a_step_that_is_not_finite_moves_no_average() -> None:
    model = nn.Linear(8, 8)
    optimizer = build_optimizer(dict(model.named_parameters()), settings())
    ema = Ema(optimizer, settings())
    for step in (1, 2):
        updated(model, optimizer)
        ema.update(step, FINITE)
    before = averages(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    ema.update(3, torch.tensor(False))
    assert all(torch.equal(*pair) for pair in zip(before, averages(optimizer), strict=True))


def test_locked_parameters_have_no_average_and_stay_in_their_place() -> None:
    fixed, free = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
    model = nn.Sequential(fixed, free)
    optimizer = build_optimizer(dict(model.named_parameters()), settings())
    ema = Ema(optimizer, settings())
    for step in (1, 2):
        updated(model, optimizer)
        ema.update(step, FINITE)
    locked, trained = fixed.weight.clone(), free.weight.clone()
    with ema.in_place():
        assert torch.equal(fixed.weight, locked)
        assert not torch.equal(free.weight, trained)
    assert torch.equal(free.weight, trained)
    assert len(averages(optimizer)) == 2


def test_weights_come_back_if_the_evaluation_of_the_average_fails() -> None:
    model = nn.Linear(8, 8)
    optimizer = build_optimizer(dict(model.named_parameters()), settings())
    ema = Ema(optimizer, settings())
    for step in (1, 2):
        updated(model, optimizer)
        ema.update(step, FINITE)
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match="in the evaluation"), ema.in_place():
        raise RuntimeError("in the evaluation")
    assert torch.equal(model.weight, before)


def test_without_the_key_there_is_no_average() -> None:
    model = nn.Linear(8, 8)
    without = settings(ema_decay=None)
    optimizer = build_optimizer(dict(model.named_parameters()), without)
    ema = Ema(optimizer, without)
    updated(model, optimizer)
    ema.update(1, FINITE)
    with ema.in_place() as has_ema:
        assert not has_ema
    assert averages(optimizer) == []


def averages(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [values[EMA].clone() for values in optimizer.state.values() if EMA in values]
