"""The mixture of trained weights with the first ones is that of WiSE-FT's own code, and leaves no trace."""

from typing import Any

import pytest
import torch
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from tests.support.jobs import tiny_job
from trainer.checkpoint.identity import RunIdentity
from trainer.config import Job
from trainer.model.anchor import first_weights, pull
from trainer.model.ema import Ema
from trainer.model.mixture import Mixture, digest_of_begin
from trainer.model.optimizer import build_optimizer, set_learning_rate


def trained_from_its_begin(share: float | None) -> tuple[nn.Module, dict[str, Any], Mixture]:
    """Returns a model that was changed, copies of its first weights, and the mixture."""
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    job = tiny_job(model={"init": "first.pt"}, eval={"mix": share, "retrieval": ("a.csv",)})
    mixture = Mixture(first_weights(dict(model.named_parameters()), job), share)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model, first, mixture


def test_the_mixture_is_that_of_wise_ft_and_leaves_the_weights_bit_equal() -> None:
    """Their `wise_ft.py`: theta = (1 - alpha) * theta_0[key] + alpha * theta_1[key]."""
    model, first, mixture = trained_from_its_begin(0.3)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with mixture.in_place() as is_there:
        assert is_there
        for name, value in model.state_dict().items():
            if name.startswith("0."):  # it is locked
                assert torch.equal(value, trained[name])
            else:
                torch.testing.assert_close(value, (1 - 0.3) * first[name] + 0.3 * trained[name])
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_weights_come_back_if_the_evaluation_of_the_mixture_fails() -> None:
    model, _, mixture = trained_from_its_begin(0.3)
    before = model.get_parameter("1.weight").clone()
    with pytest.raises(RuntimeError, match="in the evaluation"), mixture.in_place():
        raise RuntimeError("in the evaluation")
    assert torch.equal(model.get_parameter("1.weight"), before)


def test_other_first_weights_are_told_from_the_first_ones() -> None:
    job = tiny_job(model={"init": "first.pt"}, eval={"mix": 0.5, "retrieval": ("a.csv",)})
    model = nn.Linear(8, 8)
    before = digest_of_begin(job, model)
    assert before.keys() == {"model.init"}
    assert digest_of_begin(job, model) == before
    with torch.no_grad():
        model.bias[3] += 1e-7
    assert digest_of_begin(job, model) != before


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"eval": {"mix": 0.5}}, r"eval\.mix = 0\.5 mixes .* set model\.init or model\.pretrained"),
        ({"checkpoint": {"best": "mix_retrieval_t2i_r1"}}, r"mix_retrieval_t2i_r1 needs eval\.mix"),
    ],
)
def test_a_mixture_of_what_is_not_there_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny_job(**{**sections, "eval": {"retrieval": ("a.csv",), **sections.get("eval", {})}})


# The anchor pulls trained weights to the first ones as its formula says, and needs one copy of them.

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


# The moving average of the weights: timm's is the oracle.

EMA_STEPS = 6
FINITE = torch.tensor(True)


def settings(**keys: Any) -> Any:
    return tiny_job(optim={"global_batch_size": 8, "steps": EMA_STEPS, "ema_decay": 0.7, **keys}).optim


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
    for step in range(1, EMA_STEPS + 1):
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
