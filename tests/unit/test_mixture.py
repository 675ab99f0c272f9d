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
