"""Memory of the loss on one rank, as bytes of tensors that live at once.

The other ranks are made up: their rows are copies of this rank's.
"""

import pytest
import torch

from tests.support.echo import Echo
from tests.support.jobs import tiny_job
from tests.support.live_bytes import LiveBytes
from tests.support.tiles import tiles_of
from trainer.estimate.step_memory import plain_loss_bytes
from trainer.model.rank_loss import RankLoss
from trainer.model.teacher import Judgement

ROWS, WIDTH, TILE_ROWS = 128, 32, 16


def peak(kind: str, ranks: int, tile: int = TILE_ROWS, positives: str = "pairs", teachers: int = 0) -> int:
    """Peak bytes of a loss and its backward pass, beyond the features themselves."""
    inputs = [torch.randn(ROWS, WIDTH).requires_grad_() for _ in range(2)]
    inputs += [torch.tensor(number).requires_grad_() for number in (10.0, -10.0)]
    job = tiny_job(
        optim={"loss": kind, "positives": positives},
        data={"format": "auto", "train": ("a.tar",)},
        model={"targets": ("f",) * teachers},
    )
    own = [each.detach().clone() for each in inputs]
    judgements = [Judgement(*own)] * teachers
    loss = RankLoss(job, Echo(ranks, "cpu"))  # type: ignore[arg-type]
    groups = torch.arange(ROWS) // 2
    with tiles_of(tile), LiveBytes([*inputs, groups, *own]) as live:
        image, text, scale, bias = inputs
        labels = groups if job.optim.labelled else None
        loss(image, text, scale, bias if kind == "siglip" else None, judgements, groups=labels).backward()
    gradients = sum(tensor.grad.nbytes for tensor in inputs if tensor.grad is not None)
    assert live.now == gradients, "the count ends with what is left"
    return int(live.peak)


def limit(ranks: int) -> int:
    """Bytes that tiles may take: the features of all ranks and their gradients, four tiles, and some more."""
    return (2 * ranks + 1) * ROWS * WIDTH * 4 + 4 * TILE_ROWS**2 * 4 + 32 * 1024


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_loss_in_tiles_takes_features_gradients_and_four_tiles_and_the_plain_one_what_the_rule_says(
    kind: str, ranks: int
) -> None:
    for positives in ("pairs", "captions"):
        assert peak(kind, ranks, positives=positives) <= limit(ranks)
    plain = peak(kind, ranks, 0)
    assert plain > 3 * limit(ranks)
    of_the_cpu = ranks * ROWS**2 * 4 if kind == "siglip" else 0  # its log-sigmoid has a buffer
    assert plain == pytest.approx(plain_loss_bytes(ROWS, ranks * ROWS, WIDTH) + of_the_cpu, rel=0.1)
    labelled = plain_loss_bytes(ROWS, ranks * ROWS, WIDTH, labelled=True)
    assert 0.6 * labelled < peak(kind, ranks, 0, "captions") <= 1.05 * labelled


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("teachers", [1, 3])
def test_each_teacher_takes_as_much_as_a_loss_without_any(ranks: int, teachers: int) -> None:
    ruled = plain_loss_bytes(ROWS, ranks * ROWS, WIDTH, teachers=teachers)
    assert peak("clip", ranks, teachers=teachers) == pytest.approx(ruled, rel=0.1)
    assert 0.5 * ruled < peak("siglip", ranks, teachers=teachers) <= 1.05 * ruled
