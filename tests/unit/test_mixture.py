"""The mixture of trained weights with the first ones is that of WiSE-FT's own code, and leaves no trace."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.jobs import tiny_job
from trainer.model.anchor import first_weights
from trainer.model.mixture import Mixture, digest_of_begin


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


def test_the_best_mixture_needs_one() -> None:
    with pytest.raises(ValueError, match=r"mix_retrieval_t2i_r1 needs eval\.mix"):
        tiny_job(eval={"retrieval": ("a.csv",)}, checkpoint={"best": "mix_retrieval_t2i_r1"})
