"""The anchor pulls trained weights to the first ones as its formula says, and needs one copy of them."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.jobs import tiny_job
from trainer.checkpoint.identity import RunIdentity
from trainer.config import Job
from trainer.model.anchor import first_weights, pull
from trainer.model.optimizer import build_optimizer, set_learning_rate

RATE, ANCHOR, STEPS = 0.03, 2.5, 7


def job_of(**optim: Any) -> Job:
    return tiny_job(
        model={"init": "first.pt"},
        optim={"lr": RATE, "anchor": ANCHOR, "weight_decay": 0.0, **optim},
        eval={"mix": 0.25, "retrieval": ("a.csv",)},
    )


def made() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return dict(nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5)).double().named_parameters())


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_pull_follows_the_update_of_adamw_with_the_learning_rate_of_the_step(decay: float) -> None:
    parameters, theirs = made(), made()
    job = job_of(weight_decay=decay, no_decay=("1.*",))
    optimizer, first = build_optimizer(parameters, job.optim), first_weights(parameters, job)
    hand = torch.optim.AdamW(
        [
            {"params": [theirs["0.weight"]], "weight_decay": decay},
            {"params": [value for name, value in theirs.items() if name != "0.weight"], "weight_decay": 0.0},
        ],
        betas=(job.optim.beta1, job.optim.beta2),
        eps=job.optim.eps,
    )
    begin = theirs["0.weight"].detach().clone()
    for step in range(STEPS):
        rate = RATE / (1 + step)
        set_learning_rate(optimizer, rate)
        for group in hand.param_groups:
            group["lr"] = rate
        for name, parameter in parameters.items():
            parameter.grad = torch.randn_like(parameter)
            theirs[name].grad = parameter.grad.clone()
        optimizer.step()
        pull(optimizer, first, torch.tensor(False))  # as in a step that is not finite
        pull(optimizer, first, torch.tensor(True))
        hand.step()
        with torch.no_grad():
            theirs["0.weight"].sub_(rate * ANCHOR * (theirs["0.weight"] - begin))
    torch.testing.assert_close(parameters, theirs, rtol=1e-12, atol=1e-15)


def test_an_anchor_without_given_first_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.anchor = 2 pulls trained weights to those .* are random"):
        tiny_job(optim={"anchor": 2.0})


def test_other_first_weights_make_another_run() -> None:
    then = RunIdentity(
        job_of(), 64, anchor={"model.init": "a"}, order={"block_samples": 7, "lanes": 8}
    ).facts()
    assert RunIdentity(job_of(), 64, anchor={"model.init": "a"}).changes(then) == []
    assert RunIdentity(job_of(), 64, anchor={"model.init": "b"}).changes(then) == [
        "model.init has other weights than then, and optim.anchor pulls to them"
    ]
