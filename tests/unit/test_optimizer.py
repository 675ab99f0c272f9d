"""Learning rate and parameter groups."""

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from timm.optim._param_groups import param_groups_layer_decay
from torch import nn

from tests.support.command_line import problems
from tests.support.jobs import COCA
from trainer.config import Model, Optim
from trainer.config.learning_rate import learning_rate
from trainer.config.optimizers import NO_DECAY_IN_OPEN_CLIP_4, OPTIMIZERS, OptimizerName
from trainer.estimate.architecture import architecture
from trainer.model.layer_numbers import layers_of
from trainer.model.optimizer import build_optimizer, is_matrix, set_learning_rate, update_if

SETTINGS = Optim(global_batch_size=8, steps=100, lr=1e-3, min_lr=1e-5, warmup_steps=10)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rates = [learning_rate(SETTINGS, step, 100) for step in range(10)]
    assert rates == pytest.approx([1e-4 * (step + 1) for step in range(10)])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_begins_at_the_peak_passes_the_middle_and_ends_at_the_floor(schedule: str) -> None:
    settings = SETTINGS.model_copy(update={"schedule": schedule})
    rates = [learning_rate(settings, step, 100) for step in (10, 55, 100)]
    assert rates == pytest.approx([1e-3, (1e-3 + 1e-5) / 2, 1e-5])


@pytest.mark.parametrize(("power", "middle"), [(1.0, 0.5), (2.0, 0.25), (0.5, 0.5**0.5)])
def test_a_constant_rate_falls_in_the_cooldown(power: float, middle: float) -> None:
    settings = SETTINGS.model_copy(
        update={"schedule": "constant", "cooldown_share": 0.2, "cooldown_power": power}
    )
    rates = [learning_rate(settings, step, 100) for step in range(101)]
    assert rates[10:81] == [1e-3] * 71
    assert rates[90] == pytest.approx(1e-5 + (1e-3 - 1e-5) * middle)
    assert rates[100] == pytest.approx(1e-5)
    assert rates[80:] == sorted(rates[80:], reverse=True)


def test_a_constant_rate_stays_and_a_warm_up_as_long_as_the_run_divides_by_nothing() -> None:
    settings = SETTINGS.model_copy(update={"schedule": "constant"})
    assert {learning_rate(settings, step, 100) for step in range(10, 101)} == {1e-3}
    whole = Optim(global_batch_size=8, steps=10, warmup_steps=10)
    assert learning_rate(whole, 9, 10) == pytest.approx(whole.lr)


def test_a_decay_to_a_nearer_end_begins_at_the_rate_that_the_run_had() -> None:
    settings = SETTINGS.model_copy(update={"decay_from_step": 50, "decay_from_lr": 5e-4})
    rates = [learning_rate(settings, step, 100) for step in (50, 75, 100)]
    assert rates == pytest.approx([5e-4, (5e-4 + 1e-5) / 2, 1e-5])


def test_gains_biases_and_logit_scale_do_not_decay_and_locked_parameters_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
    decayed, free = groups_of(model)
    assert [p.shape for p in decayed["params"]] == [(2, 3)]
    assert (decayed["weight_decay"], free["weight_decay"]) == (SETTINGS.weight_decay, 0)
    assert len(free["params"]) == 4
    model[0].weight.requires_grad_(False)
    assert [len(group["params"]) for group in groups_of(model)] == [0, 4]


def groups_of(model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
    settings = SETTINGS.model_copy(update=keys)
    return build_optimizer(dict(model.named_parameters()), settings).param_groups


def test_swins_tables_of_biases_do_not_decay_as_in_open_clip_train() -> None:
    model = timm_clip("swin_tiny_patch4_window7_224")
    tables = [
        name
        for name, parameter in model.named_parameters()
        if "relative_position_bias_table" in name and parameter.ndim == 2
    ]
    assert tables
    keys, theirs = {}, open_clip_trains_rule()
    if theirs is None:  # from 4 on a function makes it from what the model's modules say
        from open_clip_train.optim import make_wd_exclude

        keys, theirs = {"no_decay": NO_DECAY_IN_OPEN_CLIP_4}, make_wd_exclude(model)
    decayed, free = ({id(p) for p in group["params"]} for group in groups_of(model, **keys))
    for name, parameter in model.named_parameters():
        assert (id(parameter) in free) is theirs(name, parameter), name
        assert (id(parameter) in decayed) is not theirs(name, parameter), name
        assert name not in tables or id(parameter) in free


def open_clip_trains_rule() -> Callable[[str, nn.Parameter], bool] | None:
    """Returns the rule of open_clip_train 3.3 for parameters without weight decay; None for a later one.

    The rule is taken from the source of its main.py, which has no function to call.
    """
    package = importlib.util.find_spec("open_clip_train")
    assert package is not None
    source = Path(str(package.origin)).with_name("main.py")  # not imported: it wants more packages
    lines = source.read_text().splitlines()
    rule = next((line for line in lines if line.strip().startswith("exclude = lambda")), None)
    if rule is None:
        return None
    decays_there: Callable[[str, nn.Parameter], bool] = eval(rule.partition("=")[2].strip())
    return decays_there


LAYERS = 3
RATES = SETTINGS.model_copy(
    update={"image_lr": 2e-3, "text_lr": 5e-4, "image_layer_decay": 0.5, "text_layer_decay": 0.8}
)


def scales(model: nn.Module, settings: Optim) -> dict[str, float]:
    """Factor of each parameter's learning rate, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(dict(model.named_parameters()), settings, layers_of(model))
    set_learning_rate(optimizer, 1.0)
    return {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}


SMALL_VISION = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32}
SMALL_TEXT = {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": LAYERS}
BASE_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12}


def small_clip(vision: dict[str, Any], text: dict[str, int] = SMALL_TEXT, embed_dim: int = 16) -> nn.Module:
    model: nn.Module = open_clip.CLIP(embed_dim, vision, text)
    return model


def timm_clip(name: str) -> nn.Module:
    return small_clip({"timm_model_name": name, "timm_model_pretrained": False, "image_size": 224})


def coca(**decoder: int) -> nn.Module:
    """The tiny CoCa, whose decoder has other keys."""
    parts = json.loads(Path(COCA).read_text())
    writing = {**parts["multimodal_cfg"], **decoder}
    model: nn.Module = open_clip.CoCa(parts["embed_dim"], writing, parts["text_cfg"], parts["vision_cfg"])
    return model


def assert_fall(rates: dict[str, float], whole: float, decay: float, powers: dict[str, int]) -> None:
    """The rates have so many powers of the decay."""
    assert {name: rates[name] for name in powers} == pytest.approx(
        {name: whole * decay**power for name, power in powers.items()}
    )


def test_learning_rates_fall_from_layer_to_layer_of_each_tower() -> None:
    rates = scales(small_clip({**SMALL_VISION, "layers": LAYERS}), RATES)
    powers = {
        "visual.class_embedding": 4,
        "visual.positional_embedding": 4,
        "visual.conv1.weight": 4,
        "visual.ln_pre.bias": 4,
        "visual.transformer.resblocks.0.mlp.c_fc.weight": 3,
        "visual.transformer.resblocks.2.attn.in_proj_weight": 1,
        "visual.ln_post.weight": 0,
        "visual.proj": 0,
    }
    assert_fall(rates, 2.0, 0.5, powers)
    powers = {
        "token_embedding.weight": 4,
        "positional_embedding": 4,
        "transformer.resblocks.0.ln_1.weight": 3,
        "transformer.resblocks.2.mlp.c_proj.bias": 1,
        "ln_final.weight": 0,
        "text_projection": 0,
    }
    assert_fall(rates, 0.5, 0.8, powers)
    assert rates["logit_scale"] == 1.0


@pytest.mark.parametrize(
    ("name", "is_last"),
    [
        ("text.transformer.pooler.dense.weight", True),  # BERT
        ("text.transformer.final_layer_norm.weight", True),  # T5
        ("text.transformer.final_norm.weight", True),  # ModernBERT
        ("text.pool.query", True),  # open_clip 4
        ("text.proj.0.weight", True),
        ("text.transformer.embeddings.norm.weight", False),
        ("text.token_embedding.weight", False),
    ],
)
def test_what_is_behind_the_blocks_of_a_text_tower_has_the_whole_rate(name: str, is_last: bool) -> None:
    model = nn.Module()
    for each in ("text.transformer.layers.0.attn.weight", name):
        *parents, last = each.split(".")
        place = model
        for parent in parents:
            if parent not in dict(place.named_children()):
                place.add_module(parent, nn.Module())
            place = place.get_submodule(parent)
        place.register_parameter(last, nn.Parameter(torch.zeros(1)))
    layer = layers_of(model)[name]
    assert layer.number == (layer.last if is_last else 0)


def test_cocas_decoder_is_behind_the_text_tower_whose_layers_keep_their_depth() -> None:
    rates = scales(coca(layers=2 * json.loads(Path(COCA).read_text())["text_cfg"]["layers"]), RATES)
    decoder = {rate for name, rate in rates.items() if name.startswith("text_decoder.")}
    assert list(decoder) == [pytest.approx(0.5)]
    powers = {
        "text.token_embedding.weight": 3,
        "text.cls_emb": 3,
        "text.transformer.resblocks.0.ln_1.weight": 2,
        "text.transformer.resblocks.1.mlp.c_fc.weight": 1,
        "text.ln_final.weight": 0,
        "text.text_projection": 0,
    }
    assert_fall(rates, 0.5, 0.8, powers)
    assert rates["visual.attn_pool.query"] == rates["visual.attn_pool.attn.q_proj_weight"] == 2.0


def test_layers_of_a_resnet_are_its_blocks() -> None:
    rates = scales(small_clip({"layers": [1, 2, 1, 1], "width": 8, "image_size": 64}), RATES)
    powers = {
        "visual.conv1.weight": 6,
        "visual.layer1.0.conv1.weight": 5,
        "visual.layer2.1.bn1.weight": 3,
        "visual.layer4.0.conv3.weight": 1,
        "visual.attnpool.c_proj.weight": 0,
    }
    assert_fall(rates, 2.0, 0.5, powers)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "resnet18"])
def test_rates_of_timms_towers_are_those_of_timm(name: str) -> None:
    model = timm_clip(name)
    trunk: Any = model.get_submodule("visual.trunk")
    theirs = param_groups_layer_decay(trunk, weight_decay=0.2, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in trunk.named_parameters()}
    rates = scales(model, RATES)
    for group in theirs:
        for parameter in group["params"]:
            own = f"visual.trunk.{names[id(parameter)]}"
            assert rates[own] == pytest.approx(2.0 * group["lr_scale"]), own


def test_names_that_the_job_spares_do_not_decay() -> None:
    model = small_clip(SMALL_VISION)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, _ = groups_of(model, no_decay=("*positional_embedding", "visual.proj"))
    kept = {names[id(p)] for p in decayed["params"]}
    assert not kept & {"visual.positional_embedding", "positional_embedding", "visual.proj"}
    assert {"text_projection", "visual.conv1.weight"} <= kept


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_tensors_of_the_names_and_as_many_values_as_its_row_says(
    name: OptimizerName,
) -> None:
    """A checkpoint takes no other values: not those of groups, nor numbers beside the tensors."""
    model = nn.Linear(64, 128)
    settings = SETTINGS.model_copy(update={"optimizer": name})
    optimizer = build_optimizer(dict(model.named_parameters()), settings)
    before = [set(group) for group in optimizer.param_groups]
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert [set(group) for group in optimizer.param_groups] == before
    states = optimizer.state.values()
    assert {" ".join(sorted(kept)) for kept in states} == {*OPTIMIZERS[name].state}
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
        state = {
            f"{number} {key}": value
            for number, values in enumerate(optimizer.state.values())
            for key, value in values.items()
        }
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


def test_check_counts_what_muon_keeps_of_a_model() -> None:
    shape = architecture(Model(name="ViT-B-32"))
    assert shape is not None
    with torch.device("meta"):
        model = small_clip({"layers": 12, "width": 768, "patch_size": 32, "image_size": 224}, BASE_TEXT, 512)
    settings = SETTINGS.model_copy(update={"optimizer": "muon"})
    kept = sum(
        p.numel() * (1 if group["use_muon"] else 2)
        for group in groups_of(model, optimizer="muon")
        for p in group["params"]
    )
    assert settings.state_values(shape.trained_parameters, shape.trained_tables) == pytest.approx(
        kept, rel=0.02
    )
    assert settings.state_values(shape.trained_parameters) == 2 * shape.trained_parameters


def test_lamb_is_that_of_its_paper() -> None:
    """Algorithm 2 of arXiv 1904.00962 in its notation; gains and biases, without decay, take Adam's step."""
    settings = SETTINGS.model_copy(update={"optimizer": "lamb", "weight_decay": 0.1})
    model, x = after_steps(settings, 3)
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
    model, x = after_steps(settings, 3)
    weight, bias = (nn.Parameter(x[name].clone()) for name in ("weight", "bias"))
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [weight], lr=settings.lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [bias], lr=settings.lr, betas=(0.95, settings.beta2), eps=settings.eps, weight_decay=0
        ),
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


def after_steps(settings: Optim, steps: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns a layer after so many steps, and its parameters before them."""
    torch.manual_seed(0)
    model = nn.Linear(24, 16).double()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(dict(model.named_parameters()), settings)
    for step in range(1, steps + 1):
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


def test_muon_takes_no_tables_vectors_and_convolutions_for_matrices() -> None:
    model = small_clip(SMALL_VISION)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_rule: dict[bool, set[str]] = {True: set(), False: set()}
    for group in groups_of(model, optimizer="muon"):
        by_rule[group["use_muon"]] |= {names[id(parameter)] for parameter in group["params"]}
    assert {
        "visual.transformer.resblocks.0.attn.in_proj_weight",
        "transformer.resblocks.0.mlp.c_fc.weight",
        "visual.proj",
        "text_projection",
    } <= by_rule[True]
    assert {
        "visual.conv1.weight",
        "visual.class_embedding",
        "visual.positional_embedding",
        "token_embedding.weight",
        "positional_embedding",
        "visual.ln_post.weight",
        "logit_scale",
    } <= by_rule[False]
    assert all(model.get_parameter(name).ndim == 2 for name in by_rule[True])


@pytest.mark.parametrize("name", ["T5", "GPT-2", "levit_128s", "samvit_base_patch16"])
def test_muon_takes_the_weights_of_layers_alone(name: str) -> None:
    """T5 and GPT-2 have tables without "embed" in their names; biases of attention have two dimensions."""
    there = pytest.importorskip("transformers")
    makers: dict[str, Callable[[], nn.Module]] = {
        "T5": lambda: there.T5EncoderModel(there.T5Config(num_layers=2)),
        "GPT-2": lambda: there.GPT2Model(there.GPT2Config(n_layer=2)),
    }
    with torch.device("meta"):
        model = nn.ModuleDict({"tower": makers[name]() if name in makers else timm.create_model(name)})
    kinds = (nn.Linear, there.pytorch_utils.Conv1D)
    layers = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, kinds)}
    assert {name for name, parameter in model.named_parameters() if is_matrix(name, parameter)} == layers


def test_muon_takes_neither_cocas_queries_nor_its_choice_of_words() -> None:
    with torch.device("meta"):
        model = coca()
    matrices = {name for name, parameter in model.named_parameters() if is_matrix(name, parameter)}
    assert {
        "visual.proj",
        "visual.attn_pool.attn.q_proj_weight",
        "text.text_projection",
        "text_decoder.cross_attn.0.attn.in_proj_weight",
        "text_decoder.resblocks.1.mlp.c_fc.weight",
    } <= matrices
    assert not {"visual.attn_pool.query", "text.cls_emb", "text_decoder.text_projection"} & matrices
