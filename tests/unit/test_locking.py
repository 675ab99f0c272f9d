"""Towers that are locked but for the layers at their end: what learns, and what check says of it."""

import pytest
from open_clip.modified_resnet import ModifiedResNet
from torch import nn

from tests.support.jobs import RESNET, tiny_job
from tests.support.steps import step_of
from tests.support.thread_ranks import run_ranks
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.model.build import build_model


def built(job: Job) -> nn.Module:
    (model,) = run_ranks(1, lambda comm: build_model(job, plan(job, 1), comm).model)
    return model


@pytest.mark.skipif(
    hasattr(ModifiedResNet, "layer_groups"), reason="this open_clip unlocks parts of a ResNet"
)
def test_a_tower_without_groups_is_refused() -> None:
    with pytest.raises(InputError, match="image tower has no groups of layers that can be unlocked"):
        built(tiny_job(config=RESNET, model={"lock_image": True, "lock_image_unlocked_groups": 1}))


def test_a_locked_tower_with_batch_norm_stays_locked() -> None:
    job = tiny_job(config=RESNET, model={"lock_image": True, "unlock_after_step": 2})
    with pytest.raises(InputError, match="image tower has batch norm"):
        run_ranks(1, lambda comm: step_of(job, comm))
