"""Models without initial weights, for ranks that go on: equal to the others once a state is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.steps import same, untrained
from trainer.checkpoint.resume import expects_state
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.model.build import give_initial_weights
from trainer.train.main import prepare


@pytest.fixture(params=["vit", "resnet", "timm"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    tower = {"timm_model_name": "test_vit", "timm_pool": "token", "image_size": 32}
    (tmp_path / "timm.json").write_text(
        json.dumps({**json.loads(Path(VIT).read_text()), "vision_cfg": tower})
    )
    configs = {"vit": VIT, "resnet": RESNET, "timm": str(tmp_path / "timm.json")}
    return tiny_job(config=configs[request.param])


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers, those too that no checkpoint has."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_loaded_state_leaves_nothing_of_the_undefined_values_and_the_same_random_numbers_follow(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = untrained(job).model
    after = torch.get_rng_state()
    state = {name: tensor + 1 for name, tensor in drawn.state_dict().items()}
    drawn.load_state_dict(state)
    empty = torch.empty

    def spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", spoiled)
        skipped = untrained(job, initial_weights=False).model
    assert torch.equal(torch.get_rng_state(), after)
    parameters = sum(parameter.numel() for parameter in skipped.parameters())
    undefined = sum(int(parameter.isnan().sum()) for parameter in skipped.parameters())
    assert undefined > parameters / 2, "random values were drawn"
    skipped.load_state_dict(state)
    assert same(everything(drawn), everything(skipped))


def test_a_model_that_finds_no_state_gets_the_weights_with_which_its_job_begins(job: Job) -> None:
    model = untrained(job, initial_weights=False).model
    give_initial_weights(job, model)
    assert same(everything(untrained(job).model), everything(model))


@pytest.mark.parametrize(
    ("resume", "on_disk", "generation", "in_memory", "expected"),
    [
        ("auto", False, 1, True, False),
        ("auto", True, 1, True, True),
        ("never", True, 1, True, False),
        ("/a/checkpoint", False, 1, True, True),
        ("auto", False, 2, True, True),
        ("auto", False, 2, False, False),
        ("never", True, 2, False, True),
    ],
)
def test_state_is_expected_of_a_checkpoint_or_of_the_ranks_before(
    resume: str,
    on_disk: bool,
    generation: int,
    in_memory: bool,
    expected: bool,
    tmp_path: Path,
    alone: Comm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its = tiny_job(checkpoint={"resume": resume}, recovery={"max_restarts": 3, "keep_in_memory": in_memory})
    if on_disk:
        checkpoint = tmp_path / "checkpoints" / "step-00000003"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    monkeypatch.setattr(alone, "world", replace(alone.world, generation=generation))
    assert expects_state(its, alone, tmp_path / "checkpoints") is expected


def test_run_whose_only_checkpoint_is_damaged_does_not_begin_again_by_itself(
    tmp_path: Path, alone: Comm
) -> None:
    its = tiny_job(logging={"runs": str(tmp_path)}, health={"preflight": False})
    checkpoint = tmp_path / its.name / "checkpoints" / "step-00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint.parents[1] / "job.toml").write_text(dump_job(its))
    with pytest.raises(InputError, match=r"the newest of 1 checkpoint is .*step-00000003.*--fresh"):
        prepare(its, alone)
