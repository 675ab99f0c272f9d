"""Learning rate and parameter groups."""

import pytest
import torch
from torch import nn

from trainer import optim
from trainer.job import Optim

SETTINGS = Optim(global_batch_size=8, steps=100, lr=1e-3, min_lr=1e-5, warmup_steps=10)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rates = [optim.learning_rate(SETTINGS, step, 100) for step in range(10)]
    assert rates == pytest.approx([1e-4 * (step + 1) for step in range(10)])


def test_cosine_begins_at_the_peak_passes_the_middle_and_nears_the_floor() -> None:
    assert optim.learning_rate(SETTINGS, 10, 100) == pytest.approx(1e-3)
    assert optim.learning_rate(SETTINGS, 55, 100) == pytest.approx((1e-3 + 1e-5) / 2)
    assert optim.learning_rate(SETTINGS, 100, 100) == pytest.approx(1e-5)


def test_warm_up_as_long_as_the_run_divides_by_nothing() -> None:
    settings = Optim(global_batch_size=8, steps=10, warmup_steps=10)
    assert optim.learning_rate(settings, 9, 10) == pytest.approx(settings.lr)


def test_gains_biases_and_logit_scale_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
    decayed, free = optim.build(model, SETTINGS, torch.device("cpu")).param_groups
    assert [p.shape for p in decayed["params"]] == [(2, 3)]
    assert decayed["weight_decay"] == SETTINGS.weight_decay
    assert len(free["params"]) == 4
    assert free["weight_decay"] == 0


def test_locked_parameters_are_not_optimized() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    decayed, free = optim.build(model, SETTINGS, torch.device("cpu")).param_groups
    assert decayed["params"] == []
    assert free["params"] == [model.bias]
