"""Learning rate and parameter groups."""

import math
from typing import Any

import open_clip
import pytest
import torch
from torch import nn

from tests.support.command_line import problems
from trainer.config import Optim
from trainer.config.learning_rate import learning_rate
from trainer.config.optimizers import OPTIMIZERS
from trainer.model.optimizer import build_optimizer, update_if

SETTINGS = Optim(global_batch_size=8, steps=100, lr=1e-3, min_lr=1e-5, warmup_steps=10)


def test_a_decay_to_a_nearer_end_begins_at_the_rate_that_the_run_had() -> None:
    settings = SETTINGS.model_copy(update={"decay_from_step": 50, "decay_from_lr": 5e-4})
    rates = [learning_rate(settings, step, 100) for step in (50, 75, 100)]
    assert rates == pytest.approx([5e-4, (5e-4 + 1e-5) / 2, 1e-5])


def groups_of(model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
    settings = SETTINGS.model_copy(update=keys)
    return build_optimizer(dict(model.named_parameters()), settings).param_groups


LAYERS = 3


SMALL_VISION = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32}
SMALL_TEXT = {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": LAYERS}


def small_clip(vision: dict[str, Any], text: dict[str, int] = SMALL_TEXT, embed_dim: int = 16) -> nn.Module:
    model: nn.Module = open_clip.CLIP(embed_dim, vision, text)
    return model


def test_names_that_the_job_spares_do_not_decay() -> None:
    model = small_clip(SMALL_VISION)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, _ = groups_of(model, no_decay=("*positional_embedding", "visual.proj"))
    kept = {names[id(p)] for p in decayed["params"]}
    assert not kept & {"visual.positional_embedding", "positional_embedding", "visual.proj"}
    assert {"text_projection", "visual.conv1.weight"} <= kept


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
