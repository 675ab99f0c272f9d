"""Micro-batches of captions of like length: the same step, with fewer tokens in the text tower."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.jobs import tiny_job
from tests.support.steps import MicroBatch, built, grads, train_step
from tests.support.text_towers import make_tower
from trainer.comm.protocol import Comm
from trainer.data.loader import Batch
from trainer.model.caption_length import CaptionLength
from trainer.train.prefetch import ByLength, Prefetcher

LONG = 20
RULE = CaptionLength(padding=1)


def captions(*lengths: int) -> Tensor:
    """Tokens with padding, 1, behind them."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 20, (len(lengths), LONG), generator=draw)
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = 1
    return tokens


def batch(*lengths: int, first: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(first)
    pixels = torch.randint(0, 255, (len(lengths), 3, 32, 32), generator=draw, dtype=torch.uint8)
    names = [f"{first + number}" for number in range(len(lengths))]
    positions, groups = torch.arange(len(lengths)), torch.arange(first, first + len(lengths))
    return Batch(pixels, captions(*lengths), 0, 0, 0, positions, names, names, (), None, groups)


def group() -> list[Batch]:
    """Two short and two long captions in each of two micro-batches."""
    return [batch(5, 20, 7, 19), batch(18, 6, 17, 3, first=4)]


def steps(by_length: ByLength | None, dtype: torch.dtype = torch.float64) -> list[MicroBatch]:
    channels = [0.5] * 3
    prefetcher = Prefetcher(torch.device("cpu"), dtype, channels, channels, RULE, 0, by_length)
    (found,) = prefetcher.steps(iter(group()), 2)
    return found


def test_the_log_says_once_what_is_spared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "clipship")
    by_length = ByLength(RULE, tells=True)
    for _ in range(25):
        by_length.order([each.tokens for each in group()])
    (line,) = caplog.messages
    assert line.split(None, 1)[1] == (
        "micro-batches by caption length: 30 % fewer tokens in the text tower in 10 steps"
    )


@pytest.mark.parametrize("kind", ["xlm-roberta", "modernbert"])
def test_the_gradient_is_that_of_the_order_of_the_loader_with_dropout_too(
    kind: str, tmp_path: Path, alone: Comm
) -> None:
    tower = make_tower(tmp_path, kind, pad_token_id=1)
    job = tiny_job(
        model={"text": str(tower), "precision": "fp64", "context_length": LONG, "patch_dropout": 0.5},
        optim={"global_batch_size": 8, "max_batch_size_per_gpu": 4},
    )
    found = []
    for by_length in (None, ByLength(RULE, tells=False)):
        clip = built(job, alone)
        assert clip.kernels.caption_length == RULE
        step = train_step(job, alone, clip.model.train())
        parts = steps(by_length)
        assert [part.rows.shape[1] for part in parts] == ([8, LONG] if by_length else [LONG, LONG])
        for part in parts:
            assert part.groups is not None
            assert [str(int(group)) for group in part.groups] == list(part.keys)
        loss = step.gradients(parts, step=3)
        found.append([loss, *grads(step.model).values()])
    assert len(found[0]) > 20
    for loaded, sorted_ in zip(*found, strict=True):
        torch.testing.assert_close(sorted_, loaded, rtol=1e-9, atol=1e-12)
