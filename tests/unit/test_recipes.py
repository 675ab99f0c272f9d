"""Each recipe of the job file: a run goes on from a checkpoint with the same bits, also on two ranks.

A recipe is a set of keys that change what a step does. Two ranks are threads here; `test_resume.py` kills
real ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.jobs import COCA, RESNET, VIT, few_words, tiny_job
from tests.support.steps import (
    MicroBatch,
    TrainStep,
    built,
    drawn,
    features,
    same,
    set_rate,
    state_of,
    train_step,
    weights_of,
)
from tests.support.thread_ranks import run_ranks
from tests.support.training import save
from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.resume import restore
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.model.teacher import build_teacher

SAMPLES, STEPS, SAVED = 8, 5, 2
LANES = {"block_samples": 7, "lanes": 8}
RECIPES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "nadamw": {"optim": {"optimizer": "nadamw"}},
    "adopt": {"optim": {"optimizer": "adopt"}},
    "lion": {"optim": {"optimizer": "lion", "lr": 1e-4}},
    "sgd": {"optim": {"optimizer": "sgd", "lr": 1e-2}},
    "adafactor": {"optim": {"optimizer": "adafactor"}},
    "lamb": {"optim": {"optimizer": "lamb"}},
    "lamb unlocked after three steps": {
        "optim": {"optimizer": "lamb", "ema_decay": 0.8},
        "model": {"lock_image": True, "unlock_after_step": 3},
    },
    "muon": {"optim": {"optimizer": "muon", "ema_decay": 0.8}},
    "rates of towers and layers": {
        "optim": {"image_lr": 3e-4, "text_lr": 2e-3, "image_layer_decay": 0.7, "text_layer_decay": 0.9}
    },
    "ema": {"optim": {"ema_decay": 0.8, "ema_from_step": 1}},
    "anchor": {"optim": {"anchor": 20.0, "ema_decay": 0.8, "image_layer_decay": 0.7}},
    "linear": {"optim": {"schedule": "linear", "warmup_steps": 2}},
    "constant with cooldown": {"optim": {"schedule": "constant", "cooldown_share": 0.6, "warmup_steps": 1}},
    "patch dropout": {"model": {"patch_dropout": 0.5}},
    "locked but the last block": {"model": {"lock_image": True, "lock_image_unlocked_groups": 2}},
    "unlocked after two steps": {"model": {"lock_image": True, "unlock_after_step": 2}},
    "lora": {"model": {"lora_rank": 2, "lora_alpha": 4.0}, "optim": {"ema_decay": 0.8}},
    "lora in one tower": {"model": {"lora_rank": 2, "lora_towers": "text"}, "optim": {"optimizer": "muon"}},
    "siglip": {"optim": {"loss": "siglip"}},
    "equal captions": {"optim": {"positives": "captions"}},
    "equal captions for siglip": {"optim": {"loss": "siglip", "positives": "captions"}},
    "label smoothing": {"optim": {"label_smoothing": 0.1}},
    "coca": {"config": COCA, "optim": {"loss": "coca", "caption_weight": 1.5}},
    "teacher": {"model": {"teacher": VIT}, "optim": {"distill_weight": 2.0}},
    "batch norm": {"config": RESNET},
}


@pytest.fixture(scope="module", autouse=True)
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gives the recipe with a teacher weights of another seed than the student's, and others a begin."""
    path = tmp_path_factory.mktemp("teacher") / "teacher.pt"
    weights_of(tiny_job(config=few_words(VIT)).model_copy(update={"seed": 9}), path)
    RECIPES["teacher"]["model"]["teacher"] = few_words(VIT)
    RECIPES["teacher"]["model"]["teacher_pretrained"] = str(path)
    for recipe in ("lora", "lora in one tower"):
        RECIPES[recipe]["model"]["pretrained"] = str(path)
    RECIPES["anchor"]["model"] = {"init": str(path)}


def job_of(recipe: str, ranks: int) -> Job:
    sections: dict[str, Any] = dict(RECIPES[recipe])
    sections["model"] = {**sections.get("model", {}), "precision": "fp64"}
    accumulation = 1 if sections.get("config") == RESNET else 2
    sections["config"] = few_words(sections.get("config", VIT))
    sections["optim"] = {
        "global_batch_size": SAMPLES,
        "max_batch_size_per_gpu": SAMPLES // ranks // accumulation,
        "steps": STEPS,
        **sections.get("optim", {}),
    }
    return tiny_job(**sections)


def samples(step: TrainStep, number: int) -> tuple[Tensor, Tensor]:
    """Images and tokens of a step's global batch, in which three samples have the same caption."""
    images, tokens = drawn(step.model, SAMPLES, seed=number)
    tokens[SAMPLES // 2 :: 2] = tokens[0]
    return images, tokens


def batches(step: TrainStep, job: Job, rank: int, ranks: int, number: int) -> list[MicroBatch]:
    """The rank's micro-batches of one step."""
    own = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    images, tokens = samples(step, number)
    groups = tokens.unique(dim=0, return_inverse=True)[1]
    parts = (each[own].split(plan(job, ranks).micro_batch_size) for each in (images, tokens, groups))
    return [MicroBatch(i, t, groups=g) for i, t, g in zip(*parts, strict=True)]


def begun(job: Job, comm: Comm) -> TrainStep:
    clip = built(job, comm)
    teacher = build_teacher(job, plan(job, comm.world.size), comm, clip)
    return train_step(job, comm, clip.model.train(), teacher)


def trained(step: TrainStep, job: Job, comm: Comm, first: int, last: int) -> None:
    for number in range(first, last):
        set_rate(step, job, number, STEPS)
        step(batches(step, job, comm.world.rank, comm.world.size, number), number)


def outputs(step: TrainStep) -> Tensor:
    """Features of a batch: what attention ignores (the bias of its keys) may differ in its weights."""
    with torch.no_grad(), step.ema.in_place():
        image, text, *_ = features(step.model.eval(), *samples(step, STEPS), "fp64")
    return torch.cat([image, text])


def state(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: weights, their average, the optimizer's values."""
    tensors: dict[str, Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name} {key}", inner)
        elif isinstance(value, Tensor):
            tensors[name] = value

    for path in checkpoint.glob("*.pt"):
        add(path.stem, torch.load(path, weights_only=True))
    return tensors


@dataclass(frozen=True)
class Whole:
    """The state and features that one rank trained in all steps, and the folder of its checkpoint."""

    state: dict[str, Tensor]
    outputs: Tensor
    checkpoint: Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Comm], Whole]:
    """Trains a recipe on one rank, once for all tests that compare with it."""
    trained_already: dict[str, Whole] = {}

    def made(recipe: str, comm: Comm) -> Whole:
        if recipe not in trained_already:
            job = job_of(recipe, 1)
            step = begun(job, comm)
            trained(step, job, comm, 0, SAVED)
            folder = tmp_path_factory.mktemp("recipe")
            run = RunIdentity(job, SAMPLES, order=LANES)
            save(folder / "middle", step, SAVED, run.facts())
            trained(step, job, comm, SAVED, STEPS)
            last = state(save(folder / "end", step, STEPS, run.facts()))
            trained_already[recipe] = Whole(last, outputs(step), folder / "middle")
        return trained_already[recipe]

    return made


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_goes_on_from_a_checkpoint_with_the_same_bits(
    recipe: str, alone: Comm, whole: Callable[[str, Comm], Whole], tmp_path: Path
) -> None:
    one, job = whole(recipe, alone), job_of(recipe, 1)
    resumed = begun(job, alone)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.add_(1.0)
    run = RunIdentity(job, SAMPLES, order=LANES)
    assert restore(job, alone, one.checkpoint, resumed, run).steps_done == SAVED
    trained(resumed, job, alone, SAVED, STEPS)
    if recipe not in ("adamw", "batch norm"):
        assert not torch.equal(whole("adamw", alone).outputs, one.outputs), "its keys change nothing"
    expected, found = one.state, state(save(tmp_path, resumed, STEPS, run.facts()))
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_computes_the_same_on_two_ranks(
    recipe: str, alone: Comm, whole: Callable[[str, Comm], Whole]
) -> None:
    def rank_main(comm: Comm) -> tuple[dict[str, Tensor], Tensor]:
        own = job_of(recipe, 2)
        step = begun(own, comm)
        trained(step, own, comm, 0, STEPS)
        return state_of(step.model), outputs(step)

    (first, found), (second, _) = run_ranks(2, rank_main)
    assert same(first, second)
    torch.testing.assert_close(found, whole(recipe, alone).outputs, rtol=1e-7, atol=1e-9)
