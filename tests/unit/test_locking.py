"""Towers that are locked but for the layers at their end: what learns, and what check says of it."""

from typing import Any

import open_clip
import pytest
import torch
from open_clip.modified_resnet import ModifiedResNet
from torch import nn

from tests.support.command_line import tiny
from tests.support.jobs import RESNET, VIT, tiny_job
from tests.support.steps import SAMPLES, accumulating, batches_of, gradients_of, step_of, with_model
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Job, Model
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.estimate.architecture import architecture
from trainer.model.build import build_model
from trainer.model.locking import lock_towers

LOGITS = {"logit_scale", "logit_bias"}


def built(job: Job) -> nn.Module:
    (model,) = run_ranks(1, lambda comm: build_model(job, plan(job, 1), comm).model)
    return model


def learning(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad} - LOGITS


@pytest.mark.parametrize("groups", range(5))
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
    settings = tiny_job(model={lock: True, unlocked: groups}).model
    ours = built(tiny_job(model={lock: True, unlocked: groups}))
    open_clip.add_model_config(VIT)
    theirs = open_clip.create_model("tiny-vit")
    getattr(theirs, f"{lock}_tower")(groups)
    assert learning(ours) == learning(theirs)
    shape = architecture(settings)
    assert shape is not None
    wanted = learning(theirs)
    counted = sum(parameter.numel() for name, parameter in theirs.named_parameters() if name in wanted)
    assert shape.trained_parameters == counted


def test_the_groups_of_timms_towers_are_counted_too() -> None:
    with torch.device("meta"):
        model = open_clip.create_model("ViT-B-16-SigLIP", device="meta", pretrained_image=False)
    settings = Model(name="ViT-B-16-SigLIP", lock_image=True, lock_image_unlocked_groups=3)
    lock_towers(model, settings)
    shape = architecture(settings)
    assert shape is not None
    image, _ = shape.trained
    counted = sum(p.numel() for name, p in model.visual.named_parameters() if p.requires_grad)
    assert image.parameters == counted
    assert image.layers == 2


@pytest.mark.parametrize("size", [4, SAMPLES])
def test_what_learns_of_a_locked_tower_has_the_gradient_that_it_has_without_a_lock(
    alone: Comm, size: int
) -> None:
    keys = {"lock_image": True, "lock_image_unlocked_groups": 2, "lock_text": True}
    keys |= {"lock_text_unlocked_layers": 1}
    job = accumulating(size, model={"precision": "fp64"})
    whole = gradients_of(step_of(job, alone), size)
    locked = gradients_of(step_of(with_model(job, **keys), alone), size)
    learnt = [name for name, gradient in locked.items() if gradient is not None]
    assert {name.partition(".")[0] for name in learnt} == {"visual", "text_projection", "logit_scale"}
    assert len(learnt) < len(whole) / 2
    for name in learnt:
        torch.testing.assert_close(locked[name], whole[name], rtol=1e-12, atol=1e-14)


@pytest.mark.skipif(
    hasattr(ModifiedResNet, "layer_groups"), reason="this open_clip unlocks parts of a ResNet"
)
def test_a_tower_without_groups_is_refused() -> None:
    with pytest.raises(InputError, match="image tower has no groups of layers that can be unlocked"):
        built(tiny_job(config=RESNET, model={"lock_image": True, "lock_image_unlocked_groups": 1}))


def test_a_step_takes_less_memory_the_fewer_layers_learn() -> None:
    def memory(**model: Any) -> int:
        gpu = {"gpus_per_node": 1, "gpu": "H100"}
        found = tiny(model={"name": "ViT-B-32", "precision": "bf16", **model}, resources=gpu, slurm={})
        return int(found["gpu_bytes"])

    partly = [memory(lock_image=True, lock_image_unlocked_groups=groups) for groups in range(14)]
    assert [memory(lock_image=True), *sorted(partly[1:]), memory()] == [*partly, memory()]
    assert len(set(partly)) == len(partly)


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
            names.append(
                {name for name, p in step.model.named_parameters() if not torch.equal(p, before[name])}
            )
        return names

    [(first, second, third)] = run_ranks(1, changed)
    assert not (first | second) & image
    assert first
    assert third >= image


def test_a_locked_tower_with_batch_norm_stays_locked() -> None:
    job = tiny_job(config=RESNET, model={"lock_image": True, "unlock_after_step": 2})
    with pytest.raises(InputError, match="image tower has batch norm"):
        run_ranks(1, lambda comm: step_of(job, comm))


def test_memory_and_checkpoints_count_a_tower_that_is_unlocked_later() -> None:
    whole = architecture(Model(name=VIT))
    later = architecture(Model(name=VIT, lock_image=True, unlock_after_step=9))
    assert whole is not None
    assert later is not None
    assert later.trained_parameters == whole.trained_parameters
