"""Memory of the loss on one rank, as bytes of tensors that live at once; the rule that chooses tiles.

The other ranks are made up: their rows are copies of this rank's.
"""

import logging
from typing import Any

import pytest
import torch

from tests.support.echo import Echo
from tests.support.jobs import tiny_job
from tests.support.live_bytes import LiveBytes
from trainer.config.loss_tile import TILE, plain_bytes, tile_rows
from trainer.model.rank_loss import RankLoss
from trainer.model.teacher import Judgement

ROWS, WIDTH, TILE_ROWS = 128, 32, 16
KINDS = pytest.mark.parametrize("kind", ["clip", "siglip"])


def peak(kind: str, ranks: int, tile: int | None, positives: str = "pairs", teachers: int = 0) -> int:
    """Peak bytes of a loss and its backward pass, beyond the features themselves."""
    inputs = [torch.randn(ROWS, WIDTH).requires_grad_() for _ in range(2)]
    inputs += [torch.tensor(number).requires_grad_() for number in (10.0, -10.0)]
    job = tiny_job(
        optim={"loss": kind, "loss_tile": tile, "positives": positives},
        data={"format": "auto", "train": ("a.tar",)},
        model={"targets": ("f",) * teachers},
    )
    own = [each.detach().clone() for each in inputs]
    judgements = [Judgement(*own)] * teachers
    loss = RankLoss(job, Echo(ranks, "cpu"))  # type: ignore[arg-type]
    groups = torch.arange(ROWS) // 2
    with LiveBytes([*inputs, groups, *own]) as live:
        image, text, scale, bias = inputs
        labels = groups if job.optim.labelled else None
        loss(image, text, scale, bias if kind == "siglip" else None, judgements, groups=labels).backward()
    gradients = sum(tensor.grad.nbytes for tensor in inputs if tensor.grad is not None)
    assert live.now == gradients, "the count ends with what is left"
    return int(live.peak)


def limit(ranks: int) -> int:
    """Bytes that tiles may take: the features of all ranks and their gradients, four tiles, and some more."""
    return (2 * ranks + 1) * ROWS * WIDTH * 4 + 4 * TILE_ROWS**2 * 4 + 32 * 1024


@KINDS
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_loss_in_tiles_takes_features_and_gradients_and_four_tiles(kind: str, ranks: int) -> None:
    assert peak(kind, ranks, TILE_ROWS) <= limit(ranks)


@KINDS
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_plain_loss_takes_more_and_as_much_as_the_rule_says(kind: str, ranks: int) -> None:
    plain = peak(kind, ranks, 0)
    assert plain > 3 * limit(ranks)
    ruled = plain_bytes(ROWS, ranks * ROWS, WIDTH)
    of_the_cpu = ranks * ROWS**2 * 4 if kind == "siglip" else 0  # its log-sigmoid has a buffer
    assert plain == pytest.approx(ruled + of_the_cpu, rel=0.1)


@KINDS
@pytest.mark.parametrize("ranks", [1, 4])
def test_labels_of_pairs_take_no_more_than_the_rule_says(kind: str, ranks: int) -> None:
    assert peak(kind, ranks, TILE_ROWS, "captions") <= limit(ranks)
    ruled = plain_bytes(ROWS, ranks * ROWS, WIDTH, labelled=True)
    assert 0.6 * ruled < peak(kind, ranks, 0, "captions") <= 1.05 * ruled


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("teachers", [1, 3])
def test_each_teacher_takes_as_much_as_a_loss_without_any(ranks: int, teachers: int) -> None:
    ruled = plain_bytes(ROWS, ranks * ROWS, WIDTH, teachers=teachers)
    assert peak("clip", ranks, None, teachers=teachers) == pytest.approx(ruled, rel=0.1)
    assert 0.5 * ruled < peak("siglip", ranks, None, teachers=teachers) <= 1.05 * ruled


@pytest.mark.parametrize(
    ("setting", "memory", "rows"),
    [(None, 1000, 0), (None, 999, TILE), (0, 1, 0), (512, 10**9, 512)],
)
def test_tiles_are_chosen_where_the_plain_loss_takes_more_than_a_tenth_of_the_memory(
    setting: int | None, memory: int, rows: int
) -> None:
    assert tile_rows(setting, 100, memory, spares=False) == rows


@pytest.mark.parametrize(
    ("samples", "ranks", "width", "gib", "rows"),
    [(32_768, 8, 512, 80, 0), (65_536, 8, 1024, 80, TILE), (65_536, 64, 1024, 80, 0)],
)
def test_the_rule_on_known_batches(samples: int, ranks: int, width: int, gib: int, rows: int) -> None:
    plain = plain_bytes(samples // ranks, samples, width)
    assert tile_rows(None, plain, gib * 2**30, spares=False) == rows


class TwoNodes(Echo):
    """Ranks on two nodes, with memory for any logits."""

    def all_gather_object(self, value: Any) -> list[Any]:
        return [(f"n{rank % 2}", 2**40) for rank in range(self.world.size)]


@pytest.mark.parametrize(
    ("kind", "setting", "says"),
    [
        (
            "clip",
            None,
            (
                "loss         in tiles of 2,048 samples "
                "(between 2 nodes the whole logits would send twice as much)"
            ),
        ),
        ("clip", 0, None),
        ("siglip", None, None),
    ],
)
def test_tiles_are_chosen_for_clip_on_several_nodes_which_then_send_no_gradient_of_features(
    caplog: pytest.LogCaptureFixture, kind: str, setting: int | None, says: str | None
) -> None:
    features, bias = torch.randn(4, 8), torch.tensor(0.0)
    optim = {"loss": kind, "loss_tile": setting}
    loss = RankLoss(tiny_job(optim=optim), TwoNodes(4, "cpu"))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        loss(features, features, torch.tensor(10.0), bias)
    assert caplog.messages == [says] * (says is not None)


def test_a_rank_says_why_it_computes_in_tiles(caplog: pytest.LogCaptureFixture) -> None:
    features = torch.randn(4, 8)
    loss = RankLoss(tiny_job(), Echo(2, "cpu"))  # type: ignore[arg-type]
    loss._memory = 1000
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            loss(features, features, torch.tensor(10.0), None)
    (message,) = caplog.messages
    assert message.startswith("loss         in tiles of 2,048 samples (the whole logits would take 0.0 GiB, ")
    assert message.endswith("more than a tenth of 0.0 GiB)")
