"""Distillation on ranks and in micro-batches, against open_clip's own loss on the whole batch."""

from typing import Any

import pytest

from tests.support.check import problems
from tests.support.jobs import VIT, few_words, small_job
from tests.support.steps import (
    Clip,
    built,
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


def test_siglip_refuses_a_teacher_whose_logits_have_no_bias(weights: str, alone: Comm) -> None:
    made = job_with(weights)
    job = made.model_copy(update={"optim": made.optim.model_copy(update={"loss": "siglip"})})
    with pytest.raises(InputError, match=r"has no logit bias, and optim.loss = .siglip. learns from"):
        build_teacher(job, plan(job, 1), alone, untrained(job))


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
