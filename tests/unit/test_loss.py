"""The ranks' shares of a loss, plain and in tiles, against open_clip's own loss on the whole batch."""

from collections.abc import Sequence
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.support.jobs import tiny_job
from tests.support.thread_ranks import run_ranks
from tests.support.tiles import tiles_of
from trainer.model.rank_loss import RankLoss

REFERENCES = {"clip": open_clip.loss.ClipLoss(), "siglip": open_clip.loss.SigLipLoss()}
SAMPLES = 12
Found = tuple[Tensor, list[Tensor | None]]
"""A loss and its gradients."""
NAMES = ("image", "text", "scale", "bias")


def _batch(kind: str, scale: float = 7.5) -> list[Tensor]:
    """Features of images and texts, scale and, for SigLIP, bias."""
    generator = torch.Generator().manual_seed(0)
    features = [
        normalize(torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64), dim=1) for _ in range(2)
    ]
    numbers = [scale, -3.0] if kind == "siglip" else [scale]
    return [*features, *(torch.tensor(number, dtype=torch.float64) for number in numbers)]


def _inputs(batch: Sequence[Tensor], own: slice, frozen: str) -> list[Tensor]:
    """The part of a rank, each tensor with a gradient of its own unless it is frozen."""
    parts = [tensor[own] if tensor.ndim else tensor for tensor in batch]
    return [
        part.clone().requires_grad_(name not in frozen)
        for name, part in zip(NAMES[: len(parts)], parts, strict=True)
    ]


def _whole(kind: str, batch: Sequence[Tensor], frozen: str) -> Found:
    """The loss of one process that holds the whole batch, and its gradients."""
    inputs = _inputs(batch, slice(None), frozen)
    loss = REFERENCES[kind](*inputs)
    loss.backward()
    return loss.detach(), [tensor.grad for tensor in inputs]


def _assert_exact(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


def _assert_same(actual: Found, expected: Found) -> None:
    _assert_exact(actual[0], expected[0])
    for gradient, wanted in zip(actual[1], expected[1], strict=True):
        assert (gradient is None) == (wanted is None)
        if gradient is not None:
            _assert_exact(gradient, wanted)


def _share(
    kind: str, comm: Any, inputs: list[Tensor], smoothing: float = 0.0, groups: Tensor | None = None
) -> Tensor:
    image, text, scale, *bias = inputs
    loss = RankLoss(tiny_job(optim={"loss": kind, "label_smoothing": smoothing}), comm)
    return loss(image, text, scale, bias[0] if bias else None, groups=groups)


def _together(
    kind: str,
    batch: Sequence[Tensor],
    ranks: int,
    tile: int,
    frozen: str,
    smoothing: float = 0.0,
    groups: Tensor | None = None,
) -> Found:
    """The same of ranks: shares are added, gradients of features put together, others added."""
    rows = SAMPLES // ranks

    def rank_main(comm: Any) -> Found:
        own = slice(comm.world.rank * rows, (comm.world.rank + 1) * rows)
        inputs = _inputs(batch, own, frozen)
        share = _share(kind, comm, inputs, smoothing, None if groups is None else groups[own])
        share.backward()
        return share.detach(), [tensor.grad for tensor in inputs]

    with tiles_of(tile):
        done = run_ranks(ranks, rank_main)
    gradients = [
        None if parts[0] is None else torch.cat(parts) if parts[0].ndim else torch.stack(parts).sum(0)
        for parts in zip(*[gradients for _, gradients in done], strict=True)
    ]
    return torch.stack([share for share, _ in done]).sum(), gradients


def test_a_bias_of_the_softmax_loss_gets_a_gradient_of_zero_in_tiles() -> None:
    """The logits of a softmax all move with it. A reducer waits for a gradient, so there is one."""
    batch = [*_batch("clip"), torch.tensor(-3.0, dtype=torch.float64)]
    for tile in (0, 2):
        loss, gradients = _together("clip", batch, 2, tile, "")
        _assert_exact(loss, _whole("clip", batch[:3], "")[0])
        assert gradients[3] is not None
        assert abs(gradients[3].item()) < 1e-15


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_loss_in_tiles_without_gradients_is_the_same_and_sends_no_normalisers(kind: str) -> None:
    batch = _batch(kind)

    def rank_main(comm: Any) -> tuple[Tensor, int]:
        with torch.no_grad():
            share = _share(kind, comm, _inputs(batch, slice(None), ""))
        return share, len(comm.sent)

    with tiles_of(5):
        ((share, sent),) = run_ranks(1, rank_main)
    _assert_exact(share, _whole(kind, batch, "")[0])
    assert not share.requires_grad
    assert sent == 0


def test_a_second_backward_pass_of_tiles_is_refused() -> None:
    def rank_main(comm: Any) -> None:
        share = _share("clip", comm, _inputs(_batch("clip"), slice(None), ""))
        share.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="its gradient is gone"):
            share.backward()

    run_ranks(1, rank_main)


@pytest.mark.parametrize("tile", [0, 2])
def test_siglip_without_a_bias_is_refused(tile: int) -> None:
    def rank_main(comm: Any) -> None:
        with pytest.raises(ValueError, match="logit bias"):
            _share("siglip", comm, _batch("clip"))

    with tiles_of(tile):
        run_ranks(1, rank_main)


@pytest.mark.parametrize("tile", [0, 5])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_samples_that_are_each_alone_in_their_group_have_the_loss_of_pairs(kind: str, tile: int) -> None:
    batch = _batch(kind)
    _assert_same(_together(kind, batch, 2, tile, "", groups=torch.arange(SAMPLES)), _whole(kind, batch, ""))
