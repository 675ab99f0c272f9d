"""The anchor pulls trained weights to the first ones as its formula says, and needs one copy of them."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.jobs import tiny_job
from trainer.checkpoint.identity import RunIdentity
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.estimate.architecture import architecture
from trainer.estimate.size import checkpoint_bytes
from trainer.estimate.step_memory import step_memory
from trainer.model.anchor import first_weights, pull
from trainer.model.mixture import Mixture, digest_of_begin
from trainer.model.optimizer import build_optimizer, parameter_groups, set_learning_rate

FINITE = torch.tensor(True)
RATE, ANCHOR, STEPS = 0.03, 2.5, 7


def job_of(**optim: Any) -> Job:
    return tiny_job(
        model={"init": "first.pt"},
        optim={"lr": RATE, "anchor": ANCHOR, "weight_decay": 0.0, **optim},
        eval={"mix": 0.25, "retrieval": ("a.csv",)},
    )


def made() -> tuple[nn.Module, dict[str, nn.Parameter]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5)).double()
    return model, dict(model.named_parameters())


def test_steps_with_one_gradient_end_where_the_closed_form_says() -> None:
    """With r = 1 - lr * anchor and the same gradient g in T steps: w_T = w_0 - lr g (r + r^2 + ... + r^T)."""
    model, parameters = made()
    job = job_of()
    optimizer = torch.optim.SGD(parameter_groups(parameters, job.optim, {}), lr=RATE)
    first = first_weights(parameters, job)
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: torch.randn_like(value) for name, value in begin.items()}
    for _ in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        optimizer.step()
        pull(optimizer, first, FINITE)
    kept = 1 - RATE * ANCHOR
    for name, value in model.state_dict().items():
        steps = kept * (1 - kept**STEPS) / (1 - kept) if value.ndim == 2 else STEPS
        expected = begin[name] - RATE * steps * gradients[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-15 * (1 + float(expected.abs().max())))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_pull_follows_the_update_of_adamw_with_the_learning_rate_of_the_step(decay: float) -> None:
    model, parameters = made()
    job = job_of(weight_decay=decay, no_decay=("1.*",))
    optimizer, first = build_optimizer(parameters, job.optim), first_weights(parameters, job)
    twin, theirs = made()
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
        pull(optimizer, first, FINITE)
        hand.step()
        with torch.no_grad():
            theirs["0.weight"].sub_(rate * ANCHOR * (theirs["0.weight"] - begin))
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-15)


def test_a_step_that_is_not_finite_pulls_nothing() -> None:
    _, parameters = made()
    job = job_of()
    optimizer, first = build_optimizer(parameters, job.optim), first_weights(parameters, job)
    with torch.no_grad():
        parameters["0.weight"].add_(1.0)
    before = parameters["0.weight"].clone()
    pull(optimizer, first, torch.tensor(False))
    assert torch.equal(parameters["0.weight"], before)
    pull(optimizer, first, FINITE)
    assert not torch.equal(parameters["0.weight"], before)


def test_without_the_key_nothing_is_kept_and_nothing_moves() -> None:
    _, parameters = made()
    without = tiny_job(optim={"anchor": 0.0})
    optimizer, first = build_optimizer(parameters, without.optim), first_weights(parameters, without)
    assert first == {}
    before = {name: value.clone() for name, value in parameters.items()}
    pull(optimizer, first, FINITE)
    assert all(torch.equal(value, before[name]) for name, value in parameters.items())


def test_a_mixture_takes_the_anchors_copy_of_the_first_weights() -> None:
    _, parameters = made()
    first = first_weights(parameters, job_of())
    begin = parameters["0.weight"].detach().clone()
    mixture = Mixture(first, 0.25)
    with torch.no_grad():
        parameters["0.weight"].add_(4.0)
    with mixture.in_place() as is_there:
        assert is_there
        torch.testing.assert_close(parameters["0.weight"].detach(), begin + 1.0)
    assert torch.equal(first[parameters["0.weight"]], begin)


def test_an_anchor_without_given_first_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim\.anchor = 2 pulls trained weights to those .* are random"):
        tiny_job(optim={"anchor": 2.0})


def test_other_first_weights_make_another_run() -> None:
    model, _ = made()
    begin = digest_of_begin(job_of(), model)
    then = RunIdentity(job_of(), 64, anchor=begin, order={"block_samples": 7, "lanes": 8}).facts()
    assert RunIdentity(job_of(), 64, anchor=begin).changes(then) == []
    with torch.no_grad():
        model.get_parameter("0.bias")[1] += 1e-7
    other = digest_of_begin(job_of(), model)
    assert RunIdentity(job_of(), 64, anchor=other).changes(then) == [
        "model.init has other weights than then, and optim.anchor pulls to them"
    ]


def test_the_first_weights_count_in_the_memory_of_a_step_and_not_in_checkpoints() -> None:
    with_anchor, without = job_of(), job_of(anchor=0.0)
    shape = architecture(without.model)
    assert shape is not None
    sizes = [step_memory(shape, job, plan(job, 1)).optimizer for job in (with_anchor, without)]
    assert math.isclose(sizes[0] - sizes[1], 4 * shape.trained_parameters)
    assert checkpoint_bytes(with_anchor) == checkpoint_bytes(without)
