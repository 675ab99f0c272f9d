"""Learning rate and parameter groups."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import open_clip
import pytest
import torch
from torch import nn

from trainer.config import Optim
from trainer.config.learning_rate import learning_rate
from trainer.model.optimizer import build_optimizer

SETTINGS = Optim(global_batch_size=8, steps=100, lr=1e-3, min_lr=1e-5, warmup_steps=10)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rates = [learning_rate(SETTINGS, step, 100) for step in range(10)]
    assert rates == pytest.approx([1e-4 * (step + 1) for step in range(10)])


def test_cosine_begins_at_the_peak_passes_the_middle_and_nears_the_floor() -> None:
    assert learning_rate(SETTINGS, 10, 100) == pytest.approx(1e-3)
    assert learning_rate(SETTINGS, 55, 100) == pytest.approx((1e-3 + 1e-5) / 2)
    assert learning_rate(SETTINGS, 100, 100) == pytest.approx(1e-5)


def test_a_linear_decay_is_a_line_from_the_peak_to_the_floor() -> None:
    settings = SETTINGS.model_copy(update={"schedule": "linear"})
    assert learning_rate(settings, 10, 100) == pytest.approx(1e-3)
    assert learning_rate(settings, 55, 100) == pytest.approx((1e-3 + 1e-5) / 2)
    assert learning_rate(settings, 100, 100) == pytest.approx(1e-5)


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


def test_a_constant_rate_without_cooldown_stays() -> None:
    settings = SETTINGS.model_copy(update={"schedule": "constant"})
    assert {learning_rate(settings, step, 100) for step in range(10, 101)} == {1e-3}


def test_a_cooldown_of_another_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="cooldown_share belongs to"):
        Optim(global_batch_size=8, steps=10, cooldown_share=0.2)


def test_warm_up_as_long_as_the_run_divides_by_nothing() -> None:
    settings = Optim(global_batch_size=8, steps=10, warmup_steps=10)
    assert learning_rate(settings, 9, 10) == pytest.approx(settings.lr)


def test_gains_biases_and_logit_scale_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.0)))
    decayed, free = build_optimizer(dict(model.named_parameters()), SETTINGS).param_groups
    assert [p.shape for p in decayed["params"]] == [(2, 3)]
    assert decayed["weight_decay"] == SETTINGS.weight_decay
    assert len(free["params"]) == 4
    assert free["weight_decay"] == 0


def test_locked_parameters_are_not_optimized() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    decayed, free = build_optimizer(dict(model.named_parameters()), SETTINGS).param_groups
    assert decayed["params"] == []
    assert free["params"] == [model.bias]


def test_swins_tables_of_biases_do_not_decay_as_in_open_clip_train() -> None:
    vision = {
        "timm_model_name": "swin_tiny_patch4_window7_224",
        "timm_model_pretrained": False,
        "image_size": 224,
    }
    text = {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.CLIP(16, vision, text)
    tables = [
        name
        for name, parameter in model.named_parameters()
        if "relative_position_bias_table" in name and parameter.ndim == 2
    ]
    assert tables
    decayed, free = (
        {id(p) for p in group["params"]}
        for group in build_optimizer(dict(model.named_parameters()), SETTINGS).param_groups
    )
    theirs = open_clip_trains_rule()
    for name, parameter in model.named_parameters():
        assert (id(parameter) in free) is theirs(name, parameter), name
        assert (id(parameter) in decayed) is not theirs(name, parameter), name
        assert name not in tables or id(parameter) in free


def open_clip_trains_rule() -> Callable[[str, nn.Parameter], bool]:
    """Returns open_clip_train's rule for parameters without weight decay.

    The rule is taken from the source of its main.py, which has no function to call.
    """
    package = importlib.util.find_spec("open_clip_train")
    assert package is not None
    source = Path(str(package.origin)).with_name("main.py")  # not imported: it wants more packages
    rule = next(
        line for line in source.read_text().splitlines() if line.strip().startswith("exclude = lambda")
    )
    decays_there: Callable[[str, nn.Parameter], bool] = eval(rule.partition("=")[2].strip())
    return decays_there
