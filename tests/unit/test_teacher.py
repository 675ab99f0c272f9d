"""Distillation on ranks and in micro-batches, against open_clip's own loss on the whole batch."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.support.check import problems
from tests.support.jobs import COCA, VIT, few_words, small_job
from tests.support.step_ranks import gradients_of_ranks
from tests.support.steps import (
    Clip,
    MicroBatch,
    built,
    drawn,
    grads,
    same,
    state_of,
    train_step,
    untrained,
    weights_of,
)
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.errors import InputError
from trainer.model.teacher import build_teacher, whole_captions

SAMPLES = 8
WEIGHT = 0.4


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of a teacher, of the student's size and another seed."""
    path = tmp_path_factory.mktemp("teacher") / "teacher.pt"
    return weights_of(small_job().model_copy(update={"seed": 9}), path)


def job_with(
    weights: str,
    micro: int = SAMPLES,
    teacher: str = few_words(VIT),
    temperature: float | None = None,
    **model: Any,
) -> Job:
    optim = {"global_batch_size": SAMPLES, "max_batch_size_per_gpu": micro, "steps": 4}
    keys = {"teacher": teacher, "teacher_pretrained": weights, "precision": "fp64", **model}
    return small_job(
        model=keys, optim={**optim, "distill_weight": WEIGHT, "distill_temperature": temperature}
    )


def samples() -> tuple[Tensor, Tensor]:
    return drawn(untrained(small_job()).model.double(), SAMPLES)


def open_clips(job: Job, teacher: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """open_clip's loss of the whole batch in one process, and the gradient of each parameter."""
    student = untrained(job).model.double().train()
    images, tokens = samples()
    with torch.no_grad():
        image, text, scale = teacher(images, tokens)[:3]
    temperature = job.optim.distill_temperature
    judged = image, text, scale if temperature is None else torch.tensor(1 / temperature, dtype=torch.float64)
    contrast, distilled = open_clip.loss.DistillClipLoss()(*student(images, tokens)[:3], *judged)
    whole: Tensor = contrast + WEIGHT * distilled
    whole.backward()
    return whole.detach(), grads(student)


@pytest.mark.parametrize(
    ("ranks", "micro", "temperature"), [(1, 8, None), (1, 2, 0.07), (2, 4, None), (2, 2, 0.07), (4, 1, None)]
)
def test_ranks_and_micro_batches_have_open_clips_loss_and_gradient(
    weights: str, ranks: int, micro: int, temperature: float | None, alone: Comm
) -> None:
    job = job_with(weights, micro, temperature=temperature)
    teacher = build_teacher(job, plan(job, ranks), alone, untrained(job))
    assert teacher is not None
    loss, gradients = gradients_of_ranks(job, ranks, samples(), teacher)
    expected_loss, expected = open_clips(job, teacher.model)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-14)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13, msg=name)


@pytest.fixture(scope="module")
def sigmoid_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of a teacher that has a logit bias, of another scale and bias than the student begins with."""
    path = tmp_path_factory.mktemp("sigmoid") / "teacher.pt"
    made = untrained(small_job(optim={"loss": "siglip"}).model_copy(update={"seed": 9})).model.state_dict()
    changed = {"logit_scale": torch.tensor(2.0), "logit_bias": torch.tensor(-1.5)}
    torch.save({**made, **changed}, path)
    return str(path)


def by_sigmoids(job: Job, weights: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The sigmoid loss of the matrix of all pairs and the soft labels in closed form, and the gradient."""
    student = untrained(job).model.double().train()
    teacher = untrained(small_job(optim={"loss": "siglip"})).model.double().eval()
    teacher.load_state_dict(torch.load(weights))
    images, tokens = samples()
    with torch.no_grad():
        image, text, scale, bias = teacher(images, tokens)
        odds = scale * image @ text.T + bias
        if job.optim.distill_temperature is not None:
            odds = (image @ text.T + bias / scale) / job.optim.distill_temperature
        labels = 1 / (1 + (-odds).exp())
    image, text, scale, bias = student(images, tokens)
    logits = scale * image @ text.T + bias
    is_pair = torch.eye(SAMPLES, dtype=torch.float64)
    each, other = (
        -(label * logits.sigmoid().log() + (1 - label) * (1 - logits.sigmoid()).log()).sum() / SAMPLES
        for label in (is_pair, labels)
    )
    whole: Tensor = each + WEIGHT * other
    whole.backward()
    return whole.detach(), grads(student)


@pytest.mark.parametrize(
    ("ranks", "micro", "temperature"), [(1, 8, None), (1, 2, 0.3), (2, 4, None), (2, 2, 0.3)]
)
def test_siglip_learns_from_the_sigmoids_of_all_pairs(
    sigmoid_weights: str, ranks: int, micro: int, temperature: float | None, alone: Comm
) -> None:
    made = job_with(sigmoid_weights, micro, temperature=temperature)
    job = made.model_copy(update={"optim": made.optim.model_copy(update={"loss": "siglip"})})
    teacher = build_teacher(job, plan(job, ranks), alone, untrained(job))
    assert teacher is not None
    loss, gradients = gradients_of_ranks(job, ranks, samples(), teacher)
    expected_loss, expected = by_sigmoids(job, sigmoid_weights)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-11, atol=1e-14)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-13, msg=name)


def test_siglip_refuses_a_teacher_whose_logits_have_no_bias(weights: str, alone: Comm) -> None:
    made = job_with(weights)
    job = made.model_copy(update={"optim": made.optim.model_copy(update={"loss": "siglip"})})
    with pytest.raises(InputError, match=r"has no logit bias, and optim.loss = .siglip. learns from"):
        build_teacher(job, plan(job, 1), alone, untrained(job))


def test_a_teacher_has_its_weights_learns_nothing_and_changes_no_seeded_weight(
    weights: str, alone: Comm
) -> None:
    job = job_with(weights)
    student = built(job, alone)
    teacher = build_teacher(job, plan(job, 1), alone, student)
    assert teacher is not None
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    before = state_of(teacher.model)
    saved = torch.load(weights)
    assert all(torch.equal(tensor.float(), saved[name]) for name, tensor in before.items())
    step = train_step(job, alone, student.model.train(), teacher)
    step([MicroBatch(*samples())], 0)
    assert same(state_of(teacher.model), before)
    assert same(state_of(untrained(small_job()).model), state_of(untrained(job).model))
    assert build_teacher(small_job(), plan(small_job(), 1), alone, student) is None


def test_captions_are_whole_for_a_teacher(alone: Comm) -> None:
    clip: Clip = built(small_job(), alone)
    assert clip.kernels.caption_length is not None
    assert whole_captions(clip).kernels.caption_length is None


def test_a_teacher_that_takes_other_samples_is_refused(weights: str, alone: Comm) -> None:
    job = job_with(weights, image_size=24)
    with pytest.raises(InputError, match=r"model\.teacher: .*images of another size"):
        build_teacher(job, plan(job, 1), alone, built(job, alone))


@pytest.mark.parametrize(
    ("model", "optim", "said"),
    [
        ({"teacher": VIT}, {}, "belong together"),
        ({"teacher": VIT, "teacher_pretrained": "a.pt"}, {"loss": "coca"}, "for the losses clip and siglip"),
        ({"teacher": VIT, "teacher_pretrained": "a.pt"}, {"max_batch_size_per_gpu": "auto"}, "give a number"),
    ],
)
def test_what_a_teacher_cannot_judge_is_refused(model: Any, optim: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        small_job(model=model, optim=optim)


@pytest.mark.parametrize(
    ("name", "pretrained", "said"),
    [
        ("ViT-B-31", "openai", "model.teacher: unknown model 'ViT-B-31'; did you mean"),
        ("ViT-B-32", "opanai", "model.teacher_pretrained: ViT-B-32 has no weights called 'opanai'"),
        ("ViT-B-32", "/none.pt", "model.teacher_pretrained: there is no weights file"),
        ("roberta-ViT-B-32", "laion2b_s12b_b32k", "must read captions by the same tokenizer"),
    ],
)
def test_check_names_what_is_wrong_with_a_teacher(name: str, pretrained: str, said: str) -> None:
    assert said in problems(job_with(pretrained, teacher=name))


def test_a_teacher_that_writes_captions_judges_pairs_too(tmp_path: Path, alone: Comm) -> None:
    path = weights_of(small_job(config=COCA, optim={"loss": "coca"}), tmp_path / "coca.pt")
    job = job_with(path, teacher=few_words(COCA))
    teacher = build_teacher(job, plan(job, 1), alone, untrained(job))
    assert teacher is not None
    image, text, scale, _ = teacher(*samples())
    torch.testing.assert_close(image.norm(dim=1), torch.ones(SAMPLES, dtype=torch.float64))
    assert text.shape == image.shape
    assert scale > 1
