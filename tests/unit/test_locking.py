"""Towers that are locked but for the layers at their end: what learns, and what check says of it."""

import open_clip
import pytest
import torch
from open_clip.modified_resnet import ModifiedResNet
from torch import nn

from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.steps import SAMPLES, batches_of, step_of
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.estimate.architecture import architecture
from trainer.model.build import build_model

LOGITS = {"logit_scale", "logit_bias"}


def built(job: Job) -> nn.Module:
    (model,) = run_ranks(1, lambda comm: build_model(job, plan(job, 1), comm).model)
    return model


def learning(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad} - LOGITS


@pytest.mark.parametrize("groups", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("lock", "unlocked"),
    [("lock_image", "lock_image_unlocked_groups"), ("lock_text", "lock_text_unlocked_layers")],
)
def test_the_groups_at_a_towers_end_learn_as_open_clip_has_them_and_check_counts_them(
    lock: str, unlocked: str, groups: int
) -> None:
    if groups == 4:  # projection, two blocks, all before them
        with pytest.raises(InputError, match=f"model.{unlocked} = 4 leaves the whole .* tower unlocked"):
            built(tiny_job(model={lock: True, unlocked: groups}))
        return
    job = tiny_job(model={lock: True, unlocked: groups})
    open_clip.add_model_config(VIT)
    theirs = open_clip.create_model("tiny-vit")
    getattr(theirs, f"{lock}_tower")(groups)
    assert learning(built(job)) == learning(theirs)
    shape = architecture(job.model)
    assert shape is not None
    assert shape.trained_parameters == sum(theirs.get_parameter(name).numel() for name in learning(theirs))


@pytest.mark.skipif(
    hasattr(ModifiedResNet, "layer_groups"), reason="this open_clip unlocks parts of a ResNet"
)
def test_a_tower_without_groups_is_refused() -> None:
    with pytest.raises(InputError, match="image tower has no groups of layers that can be unlocked"):
        built(tiny_job(config=RESNET, model={"lock_image": True, "lock_image_unlocked_groups": 1}))


def test_a_tower_that_is_unlocked_later_learns_from_the_step_after() -> None:
    job = tiny_job(model={"lock_image": True, "unlock_after_step": 2})
    assert learning(built(job)) == learning(built(tiny_job()))
    image = {name for name in learning(built(job)) if name.startswith("visual.")}

    def changed(comm: Comm) -> list[set[str]]:
        step = step_of(job, comm)
        names = []
        for number in range(3):
            before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
            step(batches_of(step.model, SAMPLES), number)
            named = step.model.named_parameters()
            names.append({name for name, p in named if not torch.equal(p, before[name])})
        return names

    [(first, second, third)] = run_ranks(1, changed)
    assert first - image
    assert not (first | second) & image
    assert third >= image


def test_a_locked_tower_with_batch_norm_stays_locked() -> None:
    job = tiny_job(config=RESNET, model={"lock_image": True, "unlock_after_step": 2})
    with pytest.raises(InputError, match="image tower has batch norm"):
        run_ranks(1, lambda comm: step_of(job, comm))
