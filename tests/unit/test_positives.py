"""Equal captions of a step as positives: who is equal, and the gradient against its definition."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.jobs import COCA, small_job
from tests.support.step_ranks import gradients_of_ranks
from trainer.config import Job
from trainer.model.build import untrained
from trainer.model.outputs import outputs
from trainer.model.packed_captions import pack
from trainer.model.positives import Positives, caption_groups, padding_of

SAMPLES, LENGTH, END = 8, 16, 1023
CAPTIONS = (0, 1, 0, 2, 1, 0, 3, 4)
"""Numbers of the samples' captions: equal ones are on both of two ranks, and in several micro-batches."""


def captions(padding: int = 0) -> Tensor:
    """Tokens of the samples: some captions are short, with padding behind their end."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(1, END, (5, LENGTH), generator=draw)
    for row, length in enumerate((5, 16, 9, 6, 16)):
        rows[row, length - 1] = END
        rows[row, length:] = padding
    return rows[list(CAPTIONS)]


def same(groups: Tensor) -> list[list[bool]]:
    return (groups[:, None] == groups[None]).tolist()


NUMBERS = torch.tensor(CAPTIONS)


@pytest.mark.parametrize("padding", [0, 1])
def test_captions_are_equal_if_their_tokens_are_however_far_they_are_cut(padding: int) -> None:
    tokens = captions(padding)
    whole = caption_groups([tokens], padding)
    assert same(whole) == same(NUMBERS)
    short = [number for number, caption in enumerate(CAPTIONS) if caption in (0, 3)]
    cut = caption_groups([tokens[short][:, :6], tokens[short][:, :8]], padding)
    assert torch.equal(cut, whole[short + short])


@pytest.mark.parametrize("whole", [False, True])
def test_packed_captions_have_the_groups_of_rows(whole: bool) -> None:
    tokens = captions()
    counted = (tokens == END).int().argmax(1) + 1
    packed = pack(tokens, counted, torch.device("cpu"), whole=whole)
    halves = [pack(tokens[own], counted[own], torch.device("cpu")) for own in (slice(4), slice(4, None))]
    expected = caption_groups([tokens], 0)
    assert torch.equal(caption_groups([packed], 0), expected)
    assert torch.equal(caption_groups(halves, 0), expected)


def test_the_order_of_tokens_and_their_place_count() -> None:
    rows = torch.tensor([[5, 6, 7, 0], [6, 5, 7, 0], [0, 5, 6, 7], [5, 6, 7, 7], [5, 6, 7, 0]])
    assert same(caption_groups([rows], 0)) == same(torch.tensor([0, 1, 2, 3, 0]))


def test_a_hundred_thousand_captions_of_one_word_more_or_less_have_groups_of_their_own() -> None:
    numbers = torch.arange(100_000)
    rows = torch.stack([numbers % 320, numbers // 320, torch.full_like(numbers, END)], 1)
    assert len(caption_groups([rows], 0).unique()) == len(rows)


def test_each_target_is_spread_over_the_group_and_sums_to_one() -> None:
    target = Positives(NUMBERS).target(0, 0, torch.empty(SAMPLES, SAMPLES, dtype=torch.float64))
    torch.testing.assert_close(target.sum(1), torch.ones(SAMPLES, dtype=torch.float64))
    assert target[0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 0, 1 / 3, 0, 0])
    part = Positives(NUMBERS).target(2, 4, torch.empty(3, 2, dtype=torch.float64))
    assert torch.equal(part, target[2:5, 4:6])


def job_of(kind: str, ranks: int, parts: int, **optim: Any) -> Job:
    return small_job(
        model={"precision": "fp64"},
        optim={
            "global_batch_size": SAMPLES,
            "max_batch_size_per_gpu": SAMPLES // ranks // parts,
            "loss": kind,
            "positives": "captions",
            **optim,
        },
    )


def samples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 3, 32, 32, generator=draw, dtype=torch.float64), captions()


def by_definition(job: Job) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one process on the matrix of all pairs, and its gradient."""
    model = untrained(job).model.double().train()
    image, text, scale, bias, _ = outputs(model, *samples(), "fp64")
    is_same = (NUMBERS[:, None] == NUMBERS[None]).double()
    logits = scale * image @ text.T
    if bias is not None:
        loss = -F.logsigmoid((2 * is_same - 1) * (logits + bias)).sum() / SAMPLES
    else:
        target = is_same / is_same.sum(1, keepdim=True)
        loss = -(target * (logits.log_softmax(0) + logits.log_softmax(1))).sum() / (2 * SAMPLES)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tile", [0, 3])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_ranks_and_micro_batches_have_the_gradient_of_the_definition(
    kind: str, tile: int, ranks: int, parts: int
) -> None:
    job = job_of(kind, ranks, parts, loss_tile=tile)
    loss, gradients = gradients_of_ranks(job, ranks, samples())
    expected_loss, expected = by_definition(job)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-13)


def test_padding_is_that_of_the_models_text_tower() -> None:
    from_a_hub, own = nn.Module(), nn.Module()
    from_a_hub.text, own.text = nn.Module(), nn.Module()
    from_a_hub.text.config = SimpleNamespace(pad_token_id=1)  # type: ignore[assignment]
    own.text.pad_id = 3  # type: ignore[assignment]
    assert [padding_of(model) for model in (untrained(small_job()).model, from_a_hub, own)] == [0, 1, 3]


def test_captions_of_coca_are_no_positives() -> None:
    with pytest.raises(ValueError, match=r'positives = "captions" is for the losses clip and siglip'):
        small_job(config=COCA, optim={"loss": "coca", "positives": "captions"})
