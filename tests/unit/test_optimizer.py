"""Learning rate and parameter groups."""

import math
from typing import Any

import open_clip
import pytest
import timm
import torch
from timm.optim._param_groups import param_groups_layer_decay
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from tests.support.command_line import problems
from tests.support.jobs import tiny_job
from trainer.checkpoint.identity import RunIdentity
from trainer.config import Job
from trainer.config.learning_rate import learning_rate
from trainer.config.optimizers import OPTIMIZERS
from trainer.model.anchor import first_weights, pull
from trainer.model.ema import Ema
from trainer.model.layer_numbers import layers_of
from trainer.model.mixture import Mixture, digest_of_begin
from trainer.model.optimizer import build_optimizer, set_learning_rate, update_if

SETTINGS = tiny_job(optim={"global_batch_size": 8, "steps": 100, "min_lr": 1e-5, "warmup_steps": 10}).optim


CONSTANT = {"schedule": "constant", "cooldown_share": 0.2, "cooldown_power": 2.0}


@pytest.mark.parametrize(
    ("keys", "shares"),
    [
        ({}, {10: 1, 40: 0.75, 55: 0.5, 100: 0}),
        ({"schedule": "linear"}, {10: 1, 40: 2 / 3, 55: 0.5, 100: 0}),
        (CONSTANT, {10: 1, 80: 1, 90: 0.25, 100: 0}),
        (CONSTANT | {"cooldown_share": 0.0}, {10: 1, 100: 1}),
    ],
    ids=["cosine", "linear", "cooldown", "constant"],
)
def test_a_rate_rises_along_a_line_and_falls_from_its_peak_to_its_floor(
    keys: dict[str, Any], shares: dict[int, float]
) -> None:
    settings = SETTINGS.model_copy(update=keys)
    rates = {step: learning_rate(settings, step, 100) for step in (*range(10), *shares)}
    rising = {step: 1e-4 * (step + 1) for step in range(10)}
    assert rates == pytest.approx(rising | {step: 1e-5 + 99e-5 * share for step, share in shares.items()})


def test_a_decay_to_a_nearer_end_begins_at_the_rate_that_the_run_had() -> None:
    settings = SETTINGS.model_copy(update={"decay_from_step": 50, "decay_from_lr": 5e-4})
    rates = [learning_rate(settings, step, 100) for step in (50, 75, 100)]
    assert rates == pytest.approx([5e-4, (5e-4 + 1e-5) / 2, 1e-5])


def groups_of(model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
    settings = SETTINGS.model_copy(update=keys)
    return build_optimizer(dict(model.named_parameters()), settings).param_groups


def test_vectors_tables_of_biases_and_the_scale_do_not_decay() -> None:
    """Swin's tables of biases have two dimensions; open_clip_train decays none of these."""
    names = ("a.weight", "a.bias", "relative_position_bias_table", "ln.weight", "logit_scale")
    shapes = ((3, 2), (3,), (3, 2), (3,), ())
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in zip(names, shapes, strict=True)}
    decayed, free = build_optimizer(parameters, SETTINGS).param_groups
    assert [id(each) for each in decayed["params"]] == [id(parameters["a.weight"])]
    assert (decayed["weight_decay"], free["weight_decay"]) == (SETTINGS.weight_decay, 0)


LAYERS = 3
RATES = SETTINGS.model_copy(
    update={"image_lr": 2e-3, "text_lr": 5e-4, "image_layer_decay": 0.5, "text_layer_decay": 0.8}
)


def scales(model: nn.Module, settings: Any) -> dict[str, float]:
    """Factor of each parameter's learning rate, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(dict(model.named_parameters()), settings, layers_of(model))
    set_learning_rate(optimizer, 1.0)
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


SMALL_VISION = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32}
SMALL_TEXT = {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": LAYERS}


def small_clip(vision: dict[str, Any], text: dict[str, int] = SMALL_TEXT, embed_dim: int = 16) -> nn.Module:
    model: nn.Module = open_clip.CLIP(embed_dim, vision, text)
    return model


def timm_clip(name: str) -> nn.Module:
    return small_clip({"timm_model_name": name, "timm_model_pretrained": False, "image_size": 224})


def test_learning_rates_fall_from_layer_to_layer_of_each_tower() -> None:
    rates = scales(small_clip({**SMALL_VISION, "layers": LAYERS}), RATES)
    powers_of_image = {
        **dict.fromkeys(("class_embedding", "conv1.weight", "ln_pre.bias"), 4),
        "transformer.resblocks.0.mlp.c_fc.weight": 3,
        "transformer.resblocks.2.attn.in_proj_weight": 1,
        **dict.fromkeys(("ln_post.weight", "proj"), 0),
    }
    powers_of_text = {
        **dict.fromkeys(("token_embedding.weight", "positional_embedding"), 4),
        "transformer.resblocks.0.ln_1.weight": 3,
        **dict.fromkeys(("ln_final.weight", "text_projection"), 0),
    }
    expected = {f"visual.{name}": 2.0 * 0.5**power for name, power in powers_of_image.items()}
    expected |= {name: 0.5 * 0.8**power for name, power in powers_of_text.items()} | {"logit_scale": 1.0}
    assert {name: rates[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", ["convnext_atto", "resnet18"])
def test_rates_of_timms_towers_are_those_of_timm(name: str) -> None:
    model = timm_clip(name)
    rates = scales(model, RATES)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trunk: Any = model.get_submodule("visual.trunk")
    for group in param_groups_layer_decay(trunk, weight_decay=0.2, layer_decay=0.5):
        for parameter in group["params"]:
            assert rates[names[id(parameter)]] == pytest.approx(2.0 * group["lr_scale"])


def test_names_that_the_job_spares_do_not_decay() -> None:
    model = small_clip(SMALL_VISION)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, _ = groups_of(model, no_decay=("*positional_embedding", "visual.proj"))
    kept = {names[id(p)] for p in decayed["params"]}
    assert not kept & {"visual.positional_embedding", "positional_embedding", "visual.proj"}
    assert {"text_projection", "visual.conv1.weight"} <= kept


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_tensors_of_the_names_and_as_many_values_as_its_row_says(
    name: str,
) -> None:
    """A checkpoint takes no other values."""
    settings = SETTINGS.model_copy(update={"optimizer": name})
    model = nn.Linear(64, 128)
    optimizer = build_optimizer(dict(model.named_parameters()), settings)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    states = optimizer.state.values()
    assert {" ".join(sorted(kept)) for kept in states} == {*OPTIMIZERS[settings.optimizer].state}
    assert all(isinstance(value, torch.Tensor) for kept in states for value in kept.values())
    values = sum(value.numel() for value in optimizer.state[model.weight].values())
    assert values == pytest.approx(settings.state_values(model.weight.numel(), others=0), rel=0.03)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_not_finite_leaves_parameters_and_state(name: str) -> None:
    model = nn.Linear(8, 8)
    optimizer = build_optimizer(
        dict(model.named_parameters()), SETTINGS.model_copy(update={"optimizer": name})
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(value: float) -> dict[str, torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        update_if(torch.tensor(math.isfinite(value)), optimizer, scaler)
        kept = enumerate(optimizer.state.values())
        state = {f"{number} {key}": each for number, values in kept for key, each in values.items()}
        return {name: tensor.clone() for name, tensor in (model.state_dict() | state).items()}

    before, after = step(0.5), step(math.nan)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert not torch.equal(step(0.5)["weight"], after["weight"])


def test_an_optimizer_that_looks_at_whole_parameters_is_refused_where_ranks_have_parts() -> None:
    wholes = [name for name, row in OPTIMIZERS.items() if not row.elementwise]
    assert {"lamb", "muon"} <= set(wholes)
    for name in wholes:
        sections: Any = {"optim": {"optimizer": name}, "comm": {"backend": "fsdp"}, "slurm": {}}
        assert not problems(**sections, resources={"gpus_per_node": 1})
        assert "looks at whole parameters" in problems(**sections, resources={"gpus_per_node": 2})


def test_lamb_is_that_of_its_paper() -> None:
    """Algorithm 2 of arXiv 1904.00962 in its notation; gains and biases, without decay, take Adam's step."""
    settings = SETTINGS.model_copy(update={"optimizer": "lamb", "weight_decay": 0.1})
    model, x = after_steps(settings)
    m, v = ({name: torch.zeros_like(value) for name, value in x.items()} for _ in "mv")
    for t in range(1, 4):
        for name, g in gradients(model, t).items():
            decay = 0.1 if name == "weight" else 0.0
            m[name] = settings.beta1 * m[name] + (1 - settings.beta1) * g
            v[name] = settings.beta2 * v[name] + (1 - settings.beta2) * g**2
            r = (m[name] / (1 - settings.beta1**t)) / (
                (v[name] / (1 - settings.beta2**t)).sqrt() + settings.eps
            ) + decay * x[name]
            ratio = x[name].norm() / r.norm() if decay else 1.0
            x[name] = x[name] - settings.lr * ratio * r
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), x[name], rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest() -> None:
    settings = SETTINGS.model_copy(update={"optimizer": "muon", "weight_decay": 0.1, "beta1": 0.95})
    model, x = after_steps(settings)
    weight, bias = (nn.Parameter(x[name].clone()) for name in ("weight", "bias"))
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [weight], lr=settings.lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([bias], settings.lr, (0.95, settings.beta2), settings.eps, weight_decay=0),
    ]
    for t in range(1, 4):
        grads = gradients(model, t)
        weight.grad, bias.grad = grads["weight"], grads["bias"]
        for optimizer in theirs:
            optimizer.step()
    # Newton and Schulz's steps are in bfloat16, whose products may be rounded otherwise.
    moved = (model.get_parameter("weight") - x["weight"]).detach()
    torch.testing.assert_close(moved, (weight - x["weight"]).detach(), rtol=0.02, atol=0.02 * settings.lr)
    torch.testing.assert_close(model.get_parameter("bias"), bias, rtol=1e-9, atol=1e-12)


def after_steps(settings: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns a layer after three steps, and its parameters before them."""
    torch.manual_seed(0)
    model = nn.Linear(24, 16).double()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(dict(model.named_parameters()), settings)
    for step in range(1, 4):
        for name, gradient in gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    return model, before


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Returns a made-up gradient of each parameter, larger than timm's limit for LAMB."""
    draw = torch.Generator().manual_seed(step)
    return {
        name: 3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["T5", "samvit_base_patch16"])
def test_muon_takes_the_weights_of_layers_alone(name: str) -> None:
    """T5 has tables without "embed" in their names; biases of samvit's attention have two dimensions."""
    there = pytest.importorskip("transformers")
    with torch.device("meta"):
        tower = (
            there.T5EncoderModel(there.T5Config(num_layers=2)) if name == "T5" else timm.create_model(name)
        )
    model = nn.ModuleDict({"tower": tower})
    kinds = (nn.Linear, there.pytorch_utils.Conv1D)
    layers = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = groups_of(model, optimizer="muon")
    assert {names[id(p)] for group in groups if group["use_muon"] for p in group["params"]} == layers


# The mixture of trained weights with the first ones is that of WiSE-FT's own code, and leaves no trace.


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
