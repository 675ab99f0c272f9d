"""CoCa's loss on ranks and in micro-batches, against open_clip's own loss on the whole batch."""

from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor

from tests.support.jobs import COCA, small_job
from tests.support.step_ranks import gradients_of_ranks
from tests.support.steps import drawn, grads, untrained
from trainer.config import Job
from trainer.model import open_clip_api

SAMPLES, LENGTH = 8, 16
CONTRAST, CAPTION = 0.7, 1.5


def _job(micro: int = SAMPLES, **optim: Any) -> Job:
    keys = {"loss": "coca", "global_batch_size": SAMPLES, "max_batch_size_per_gpu": micro}
    keys |= {"contrast_weight": CONTRAST, "caption_weight": CAPTION, "steps": 4, **optim}
    return small_job(config=COCA, model={"precision": "fp64"}, optim=keys)


def _samples() -> tuple[Tensor, Tensor]:
    """Images, and captions of different lengths with padding behind them."""
    images, tokens = drawn(untrained(_job()).model.double(), SAMPLES, length=LENGTH)
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
