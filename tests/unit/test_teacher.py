"""Distillation on ranks and in micro-batches, against open_clip's own loss on the whole batch."""

from typing import Any

import open_clip
import pytest
import torch
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
from trainer.model import open_clip_api
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


def open_clips(job: Job, teacher: torch.nn.Module, student: torch.nn.Module) -> Tensor:
    """open_clip's loss of the whole batch in one process."""
    images, tokens = samples()
    with torch.no_grad():
        image, text, scale = teacher(images, tokens)[:3]
    temperature = job.optim.distill_temperature
    judged = image, text, scale if temperature is None else torch.tensor(1 / temperature, dtype=torch.float64)
    contrast, distilled = open_clip.loss.DistillClipLoss()(*student(images, tokens)[:3], *judged)
    return contrast + WEIGHT * distilled  # type: ignore[no-any-return]


def by_sigmoids(job: Job, teacher: torch.nn.Module, student: torch.nn.Module) -> Tensor:
    """The sigmoid loss of the matrix of all pairs and the soft labels in closed form."""
    images, tokens = samples()
    with torch.no_grad():
        image, text, scale, bias = teacher(images, tokens)
        odds = scale * image @ text.T + bias
        if job.optim.distill_temperature is not None:
            odds = (image @ text.T + bias / scale) / job.optim.distill_temperature
    image, text, scale, bias = student(images, tokens)
    chances = (scale * image @ text.T + bias).sigmoid()
    contrast, distilled = (
        -(label * chances.log() + (1 - label) * (1 - chances).log()).sum() / SAMPLES
        for label in (torch.eye(SAMPLES, dtype=torch.float64), odds.sigmoid())
    )
    return contrast + WEIGHT * distilled  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def sigmoid_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of a teacher that has a logit bias, of another scale and bias than the student begins with."""
    path = tmp_path_factory.mktemp("sigmoid") / "teacher.pt"
    made = untrained(small_job(optim={"loss": "siglip"}).model_copy(update={"seed": 9})).model.state_dict()
    changed = {"logit_scale": torch.tensor(2.0), "logit_bias": torch.tensor(-1.5)}
    torch.save({**made, **changed}, path)
    return str(path)


@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize(("ranks", "micro", "temperature"), [(1, 8, None), (2, 4, None), (2, 2, 0.3)])
def test_ranks_and_micro_batches_have_the_loss_and_gradient_of_the_whole_batch(
    weights: str,
    sigmoid_weights: str,
    loss: str,
    ranks: int,
    micro: int,
    temperature: float | None,
    alone: Comm,
) -> None:
    made = job_with(weights if loss == "clip" else sigmoid_weights, micro, temperature=temperature)
    job = made.model_copy(update={"optim": made.optim.model_copy(update={"loss": loss})})
    teacher = build_teacher(job, plan(job, ranks), alone, untrained(job))
    assert teacher is not None
    found, gradients = gradients_of_ranks(job, ranks, samples(), teacher)
    student = untrained(job).model.double().train()
    expected = (open_clips if loss == "clip" else by_sigmoids)(job, teacher.model, student)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-11, atol=1e-14)
    assert gradients.keys() == grads(student).keys()
    for name, gradient in grads(student).items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-13, msg=name)


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
    assert same(state_of(untrained(small_job()).model), state_of(untrained(job).model))
    teacher = build_teacher(job, plan(job, 1), alone, student)
    assert teacher is not None
    before, saved = state_of(teacher.model), torch.load(weights)
    assert all(torch.equal(tensor.float(), saved[name]) for name, tensor in before.items())
    train_step(job, alone, student.model.train(), teacher)([MicroBatch(*samples())], 0)
    assert same(state_of(teacher.model), before)


def test_captions_are_whole_for_a_teacher(alone: Comm) -> None:
    clip: Clip = built(small_job(), alone)
    assert clip.kernels.caption_length is not None
    assert whole_captions(clip).kernels.caption_length is None


def test_a_teacher_that_takes_other_samples_is_refused(weights: str, alone: Comm) -> None:
    job = job_with(weights, image_size=24)
    with pytest.raises(InputError, match=r"model\.teacher: .*images of another size"):
        build_teacher(job, plan(job, 1), alone, built(job, alone))


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


# CoCa's loss on ranks and in micro-batches, against open_clip's own loss on the whole batch.

CAPTIONED, LENGTH = 8, 16
CONTRAST, CAPTION = 0.7, 1.5


def _job(micro: int = CAPTIONED, **optim: Any) -> Job:
    keys = {"loss": "coca", "global_batch_size": CAPTIONED, "max_batch_size_per_gpu": micro}
    keys |= {"contrast_weight": CONTRAST, "caption_weight": CAPTION, "steps": 4, **optim}
    return small_job(config=COCA, model={"precision": "fp64"}, optim=keys)


def _samples() -> tuple[Tensor, Tensor]:
    """Images, and captions of different lengths with padding behind them."""
    images, tokens = drawn(untrained(_job()).model.double(), CAPTIONED, length=LENGTH)
    for row, length in zip(tokens, [16, 3, 9, 5, 2, 12, 7, 4], strict=True):
        row[length:] = 0
    return images, tokens


def _open_clips(job: Job) -> tuple[Tensor, dict[str, Tensor]]:
    """open_clip's loss of the whole batch in one process, and the gradient of each parameter."""
    model = untrained(job).model.double().train()
    loss = open_clip.loss.CoCaLoss(CAPTION, CONTRAST)
    images, tokens = _samples()
    out = model(images, tokens)
    logits, labels = open_clip_api.next_token_logits(out["logits"]), tokens[:, 1:]
    contrast, captions = loss(out["image_features"], out["text_features"], logits, labels, out["logit_scale"])
    whole: Tensor = contrast + captions
    whole.backward()
    return whole.detach(), grads(model)


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2)])
def test_ranks_and_micro_batches_have_open_clips_loss_and_gradient(ranks: int, micro: int) -> None:
    loss, gradients = gradients_of_ranks(_job(micro), ranks, _samples())
    expected_loss, expected = _open_clips(_job())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-14)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-13, msg=name)


def test_without_tokens_to_write_the_loss_is_that_of_the_contrast() -> None:
    images, tokens = _samples()
    tokens[:, 1:] = 0
    loss, gradients = gradients_of_ranks(_job(2), 2, (images, tokens))
    contrast, _ = gradients_of_ranks(_job(caption_weight=0.0), 1, (images, tokens))
    torch.testing.assert_close(loss, contrast, rtol=1e-12, atol=1e-14)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_all_parameters_begin_with_defined_values_that_follow_from_the_seed() -> None:
    job = _job()
    first, second = (untrained(job).model for _ in range(2))
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    projection = first.get_parameter("text_decoder.text_projection")
    assert projection.std().item() == pytest.approx(projection.shape[0] ** -0.5, rel=0.02)
