"""One rank of `make parity`, which compares a gradient with that of one process.

The gradient is that of the trainer's own step, and the one process holds the whole batch. A launcher starts
this rank like a rank of a real run. The reference knows nothing of ranks: open_clip's model and loss, one
backward pass. Rank 0 tells the error of each case.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import open_clip
import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import few_words
from tests.support.naflex import TOKENS, rows_of, whole_precision
from tests.support.rank import joined, tell
from tests.support.tiles import tiles_of
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.model.build import Clip, build_model, untrained
from trainer.train.step import MicroBatch, TrainStep

MODELS = Path(__file__).parents[1] / "models"
GLOBAL_BATCH = 16
ROUNDING = 1e-13
TILE = 3
"""Rows of a tile of the loss: a rank's samples are no multiple of it. A case with 0 has no tiles."""


def main(backend: str, every: int = 1) -> None:
    """Tries every case, or every second or third and so on."""
    with joined(_job(backend, "tiny-vit", "clip", "pairs", GLOBAL_BATCH)) as comm:
        for case in islice(_cases(), 0, None, every):
            _try(comm, backend, *case)


def _try(
    comm: Comm, backend: str, model: str, loss: str, positives: str, tile: int, accumulation: int
) -> None:
    world = comm.world
    if GLOBAL_BATCH // world.size < accumulation:
        return
    job = _job(backend, model, loss, positives, GLOBAL_BATCH // world.size // accumulation)
    with whole_precision(), tiles_of(tile):
        error = comm.all_gather_object(_worst_error(job, comm))
    if world.rank == 0:
        row = {"ranks": world.size, "backend": backend, "launcher": world.launcher, "model": model}
        row |= {"loss": loss, "positives": positives, "tile": tile, "accumulation": accumulation}
        tell({**row, "relative_error": max(error)})


def _cases() -> Iterator[tuple[str, str, str, int, int]]:
    for loss in ("clip", "siglip"):
        for accumulation in (1, 2, 4):
            yield "tiny-vit", loss, "pairs", TILE, accumulation
        for accumulation in (1, 2):
            yield "tiny-vit", loss, "pairs", 0, accumulation
        for positives in ("captions", "images"):
            for tile in (0, TILE):
                yield "tiny-vit", loss, positives, tile, 2
    yield "tiny-resnet", "clip", "pairs", TILE, 1  # its batch norm takes statistics over all ranks
    for accumulation in (1, 2):
        yield "tiny-naflex", "siglip", "pairs", TILE, accumulation


def _job(backend: str, name: str, loss: str, positives: str, micro_batch: int) -> Job:
    return Job.model_validate(
        {
            "name": "parity",
            "data": {"format": "synthetic"},
            "model": {
                "name": few_words(str(MODELS / f"{name}.json")),
                "image_tokens": TOKENS if "naflex" in name else None,
            },
            "optim": {
                "global_batch_size": GLOBAL_BATCH,
                "max_batch_size_per_gpu": micro_batch,
                "steps": 1,
                "loss": loss,
                "positives": positives,
            },
            "comm": {"backend": backend},
        }
    )


def _worst_error(job: Job, comm: Comm) -> float:
    """The largest relative error, in norm, of any parameter's gradient.

    It is computed in float64, so that rounding hides nothing. A gradient that is zero but for rounding (the
    bias of attention's keys) is compared with the whole gradient's norm.
    """
    batch_plan = plan(job, comm.world.size)
    built = build_model(job, batch_plan, comm)
    clip = built.model.double().train()
    images, tokens = _whole_batch(built)
    groups = torch.arange(GLOBAL_BATCH) % 5  # each on all ranks and in all micro-batches
    if job.optim.positives == "captions":
        tokens[::3] = tokens[0]
        groups = tokens.unique(dim=0, return_inverse=True)[1]
    expected = _reference(job, images, tokens, groups)
    step = TrainStep(job, batch_plan, comm, clip)
    own = slice(
        comm.world.rank * batch_plan.batch_size_per_rank,
        (comm.world.rank + 1) * batch_plan.batch_size_per_rank,
    )
    parts = (each[own].split(batch_plan.micro_batch_size) for each in (images, tokens, groups))
    micro = [MicroBatch(i, t, groups=g) for i, t, g in zip(*parts, strict=True)]
    if comm.world.size <= 2:  # of more than two summands, another order has other bits
        _assert_images_come_early_with_the_same_bits(step, micro)
    step.gradients(micro, step=0)
    floor = ROUNDING * torch.stack([grad.norm() for grad in expected.values()]).norm()
    scale = {
        name: norm if (norm := grad.norm()) > floor else floor / ROUNDING for name, grad in expected.items()
    }
    gradients = {name: step.shards.whole(name, _grad(p)) for name, p in step.shards.parameters.items()}
    assert gradients.keys() == expected.keys()
    return max(float((grad - expected[name]).norm() / scale[name]) for name, grad in gradients.items())


def _assert_images_come_early_with_the_same_bits(step: TrainStep, micro: list[MicroBatch]) -> None:
    """Compares a step that gathers images beside the text tower with one that gathers them afterwards."""

    def bits() -> tuple[Tensor, list[Tensor]]:
        share = step.gradients(micro, step=0)
        return share, [_grad(parameter).clone() for parameter in step.shards.parameters.values()]

    share, early = bits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step._loss, "image_features_ready", lambda _: None)
        late_share, late = bits()
    assert torch.equal(share, late_share)
    assert all(torch.equal(one, two) for one, two in zip(early, late, strict=True))


def _whole_batch(built: Clip) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    length = built.model.context_length
    if built.images.one_size:
        shape = (GLOBAL_BATCH, *built.images.input_shape)
        images = torch.randn(shape, generator=generator, dtype=torch.float64)
    else:
        images = rows_of(built, GLOBAL_BATCH).double()
    return images, torch.randint(1, 1000, (GLOBAL_BATCH, int(length)), generator=generator)  # type: ignore[arg-type]


def _reference(job: Job, images: Tensor, tokens: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """Gradients by name, of the whole batch in this process alone, by open_clip's loss or by labels."""
    clip = untrained(job).model.double().train()
    out = clip(images, tokens)
    losses = {"clip": open_clip.loss.ClipLoss(), "siglip": open_clip.loss.SigLipLoss()}
    if job.optim.labelled:
        _labelled(groups, *out).backward()
    else:
        losses[job.optim.loss](*out).backward()
    return {name: _grad(parameter) for name, parameter in clip.named_parameters()}


def _labelled(
    groups: Tensor, image: Tensor, text: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    same = (groups[:, None] == groups).double()
    logits = scale * image @ text.T
    if bias is not None:
        return -nn.functional.logsigmoid((2 * same - 1) * (logits + bias)).sum() / len(same)
    rows = logits.log_softmax(0) + logits.log_softmax(1)
    return -(same / same.sum(1, keepdim=True) * rows).sum() / (2 * len(same))


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
