"""The ranks' shares of a loss, plain and in tiles, against open_clip's own loss on the whole batch."""

from collections.abc import Sequence
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.support.echo import Echo
from tests.support.jobs import tiny_job
from tests.support.live_bytes import LiveBytes
from tests.support.thread_ranks import run_ranks
from tests.support.tiles import tiles_of
from trainer.estimate.step_memory import plain_loss_bytes
from trainer.model.rank_loss import RankLoss
from trainer.model.teacher import Judgement

REFERENCES = {"clip": open_clip.loss.ClipLoss(), "siglip": open_clip.loss.SigLipLoss()}
SAMPLES = 12


Found = tuple[Tensor, list[Tensor | None]]
"""A loss and its gradients."""
NAMES = ("image", "text", "scale", "bias")
FAR = 300.0
"""A scale whose logits overflow float32's exponential function."""


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


CELLS = [
    (0, 1, ""), (0, 3, "image"), (0, 2, "scale bias"), (1, 4, "text"), (1, 1, ""), (2, 3, ""),
    (2, 3, "image text"), (5, 2, ""), (5, 4, "scale bias"), (64, 1, "image"), (64, 3, "text"),
]  # fmt: skip
"""Rows of a tile, ranks, and what is frozen: each pair of a tile with the others that matter."""


GROUPS = torch.tensor([3, 5, 3, 7, -2, 3, 5, 9, 11, -2, 3, 0])
"""Groups of the samples: some alone, others in two, three or four places, also of other ranks."""
ALONE = torch.arange(SAMPLES)


def _by_definition(
    kind: str, batch: Sequence[Tensor], frozen: str, smoothing: float, groups: Tensor
) -> Found:
    """The loss of one process with labels of all pairs as a matrix, and its gradients."""
    inputs = _inputs(batch, slice(None), frozen)
    image, text, scale, *bias = inputs
    same = (groups[:, None] == groups[None]).double()
    logits = scale * image @ text.T
    if kind == "siglip":
        loss = -torch.nn.functional.logsigmoid((2 * same - 1) * (logits + bias[0])).sum() / SAMPLES
    else:
        target = same / same.sum(1, keepdim=True) * (1 - smoothing) + smoothing / SAMPLES
        loss = -(target * (logits.log_softmax(0) + logits.log_softmax(1))).sum() / (2 * SAMPLES)
    loss.backward()
    return loss.detach(), [tensor.grad for tensor in inputs]


@pytest.mark.parametrize(("tile", "ranks", "frozen"), CELLS)
@pytest.mark.parametrize(
    ("kind", "smoothing", "groups"),
    [
        ("clip", 0.0, None),
        ("clip", 0.0, ALONE),
        ("clip", 0.0, GROUPS),
        ("clip", 0.15, None),
        ("clip", 0.15, GROUPS),
        ("siglip", 0.0, None),
        ("siglip", 0.0, ALONE),
        ("siglip", 0.0, GROUPS),
    ],
)
def test_shares_of_all_ranks_have_the_loss_and_gradient_of_the_whole_batch(
    kind: str, smoothing: float, groups: Tensor | None, tile: int, ranks: int, frozen: str
) -> None:
    """Those of open_clip; with groups or smoothing, those of the definition."""
    batch = _batch(kind)
    expected = _by_definition(kind, batch, frozen, smoothing, ALONE if groups is None else groups)
    if groups is not GROUPS and not smoothing:
        _assert_same(_whole(kind, batch, frozen), expected)
    _assert_same(_together(kind, batch, ranks, tile, frozen, smoothing, groups), expected)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_tiles_hold_logits_that_overflow_an_exponential(kind: str) -> None:
    batch = [tensor.float() for tensor in _batch(kind, scale=FAR)]
    loss, gradients = _together(kind, batch, 2, 2, "")
    expected_loss, expected = _whole(kind, [tensor.double() for tensor in batch], "")
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=0)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert gradient is not None
        assert wanted is not None
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-4, atol=1e-3)


def test_a_bias_of_the_softmax_loss_gets_a_gradient_of_zero_in_tiles() -> None:
    """The logits of a softmax all move with it. A reducer waits for a gradient, so there is one."""
    batch = [*_batch("clip"), torch.tensor(-3.0, dtype=torch.float64)]
    for tile in (0, 2):
        loss, gradients = _together("clip", batch, 2, tile, "")
        _assert_exact(loss, _whole("clip", batch[:3], "")[0])
        assert gradients[3] is not None
        assert abs(gradients[3].item()) < 1e-15


ROWS, WIDTH = SAMPLES // 3, 8
GATHERED = ("all_gather", (ROWS, WIDTH))
BESIDE = ("start all_gather", (ROWS, WIDTH))
"""This rank's texts are compared with the images meanwhile."""
REDUCED = ("reduce_scatter", (SAMPLES, WIDTH))


@pytest.mark.parametrize(
    ("kind", "tile", "frozen", "sent"),
    [
        ("clip", 2, "", [GATHERED, BESIDE, ("all_gather", (ROWS, 2))]),
        ("clip", 0, "", [GATHERED, GATHERED, REDUCED, REDUCED]),
        ("clip", 0, "text", [GATHERED, GATHERED, REDUCED]),
        ("siglip", 0, "", [GATHERED, REDUCED]),
        ("siglip", 2, "", [GATHERED, REDUCED]),
        ("siglip", 2, "text", [GATHERED]),
        ("siglip", 2, "image", [GATHERED]),
    ],
)
def test_ranks_exchange_no_more_than_the_loss_needs(
    kind: str, tile: int, frozen: str, sent: list[tuple[str, tuple[int, ...]]]
) -> None:
    """In tiles features and normalisers travel, and no gradient of features."""

    def rank_main(comm: Any) -> Any:
        own = slice(comm.world.rank * ROWS, (comm.world.rank + 1) * ROWS)
        _share(kind, comm, _inputs(_batch(kind), own, frozen)).backward()
        return comm.sent

    with tiles_of(tile):
        assert run_ranks(3, rank_main)[0] == sent


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


# Memory of the loss on one rank, as bytes of tensors that live at once.
# The other ranks are made up: their rows are copies of this rank's.

MEMORY_ROWS, MEMORY_WIDTH, TILE_ROWS = 128, 32, 16


def peak(kind: str, ranks: int, tile: int = TILE_ROWS, positives: str = "pairs", teachers: int = 0) -> int:
    """Peak bytes of a loss and its backward pass, beyond the features themselves."""
    inputs = [torch.randn(MEMORY_ROWS, MEMORY_WIDTH).requires_grad_() for _ in range(2)]
    inputs += [torch.tensor(number).requires_grad_() for number in (10.0, -10.0)]
    job = tiny_job(
        optim={"loss": kind, "positives": positives},
        data={"format": "auto", "train": ("a.tar",)},
        model={"targets": ("f",) * teachers},
    )
    own = [each.detach().clone() for each in inputs]
    judgements = [Judgement(*own)] * teachers
    loss = RankLoss(job, Echo(ranks, "cpu"))  # type: ignore[arg-type]
    groups = torch.arange(MEMORY_ROWS) // 2
    with tiles_of(tile), LiveBytes([*inputs, groups, *own]) as live:
        image, text, scale, bias = inputs
        labels = groups if job.optim.labelled else None
        loss(image, text, scale, bias if kind == "siglip" else None, judgements, groups=labels).backward()
    gradients = sum(tensor.grad.nbytes for tensor in inputs if tensor.grad is not None)
    assert live.now == gradients, "the count ends with what is left"
    return int(live.peak)


def limit(ranks: int) -> int:
    """Bytes that tiles may take: the features of all ranks and their gradients, four tiles, and some more."""
    return (2 * ranks + 1) * MEMORY_ROWS * MEMORY_WIDTH * 4 + 4 * TILE_ROWS**2 * 4 + 32 * 1024


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_loss_in_tiles_takes_features_gradients_and_four_tiles_and_the_plain_one_what_the_rule_says(
    kind: str, ranks: int
) -> None:
    for positives in ("pairs", "captions"):
        assert peak(kind, ranks, positives=positives) <= limit(ranks)
    plain = peak(kind, ranks, 0)
    assert plain > 3 * limit(ranks)
    of_the_cpu = ranks * MEMORY_ROWS**2 * 4 if kind == "siglip" else 0  # its log-sigmoid has a buffer
    assert plain == pytest.approx(
        plain_loss_bytes(MEMORY_ROWS, ranks * MEMORY_ROWS, MEMORY_WIDTH) + of_the_cpu, rel=0.1
    )
    labelled = plain_loss_bytes(MEMORY_ROWS, ranks * MEMORY_ROWS, MEMORY_WIDTH, labelled=True)
    assert 0.6 * labelled < peak(kind, ranks, 0, "captions") <= 1.05 * labelled


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("teachers", [1, 3])
def test_each_teacher_takes_as_much_as_a_loss_without_any(ranks: int, teachers: int) -> None:
    ruled = plain_loss_bytes(MEMORY_ROWS, ranks * MEMORY_ROWS, MEMORY_WIDTH, teachers=teachers)
    assert peak("clip", ranks, teachers=teachers) == pytest.approx(ruled, rel=0.1)
    assert 0.5 * ruled < peak("siglip", ranks, teachers=teachers) <= 1.05 * ruled
