"""Features of images and texts, computed the same way in every evaluation.

Names neither torch.distributed nor Horovod.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.protocol import Comm
from trainer.config import Job, Precision
from trainer.data.eval_blocks import EvalBlock, RetrievalBlock, eval_blocks, retrieval_blocks
from trainer.data.pictures import Decoding
from trainer.data.source import Source
from trainer.data.views import Views
from trainer.errors import InputError
from trainer.model.build import Clip
from trainer.model.outputs import autocast

_OF_VIEWS = 5
"""Dimensions of images of which each is several views."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in evaluation mode without gradients for the block, then back into its previous mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def labelled_blocks(clip: Clip, source: Source, job: Job, comm: Comm) -> Iterator[EvalBlock]:
    """Yields this rank's blocks of labelled images, as the model and the job's keys want them."""
    world = comm.world
    return eval_blocks(source, rank=world.rank, world_size=world.size, **_loading(clip, job))


def captioned_blocks(
    clip: Clip, source: Source, job: Job, rank: int = 0, world_size: int = 1, pictures: Views | None = None
) -> Iterator[RetrievalBlock]:
    """Yields a rank's blocks of captioned images, or all, as the model and the job's keys want them.

    With `pictures` each image is several.
    """
    loading = {**_loading(clip, job), "tokenizer": clip.tokenizer, "pictures": pictures}
    return retrieval_blocks(source, rank=rank, world_size=world_size, **loading)


def _loading(clip: Clip, job: Job) -> dict[str, Any]:
    return {
        "block": job.eval.batch_size,
        "transform": clip.eval_transform,
        "workers": job.data.workers,
        "decoding": Decoding.by(job.data),
        "skip_bad": job.data.on_bad_sample == "skip",
    }


def image_features(clip: Clip, images: Tensor, precision: Precision, device: torch.device) -> Tensor:
    """Returns unit vectors [n, D] of images, [n, ...] of what `Clip.eval_transform` gives.

    They are in the precision of the forward pass. Of views, [n, views, 3, H, W], there is one for each.
    """
    if images.dim() == _OF_VIEWS:
        return torch.stack([image_features(clip, each, precision, device) for each in images.unbind(1)], 1)
    images = images.to(device, torch.float64 if precision == "fp64" else images.dtype)
    with autocast(device, precision):
        features: Tensor = clip.model.encode_image(images, normalize=True)  # type: ignore[operator]
    return features


def text_features(clip: Clip, tokens: Tensor, precision: Precision, device: torch.device) -> Tensor:
    """Returns unit vectors [n, D] of tokens [n, L], in the precision of the forward pass."""
    with autocast(device, precision):
        features: Tensor = clip.model.encode_text(tokens.to(device), normalize=True)  # type: ignore[operator]
    return features


def block_features(
    clip: Clip, block: RetrievalBlock, job: Job, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the features of a block's images and of its captions, each [n, D], as `image_features` does.

    All passes have one shape, so that a block has the same features on any rank. The block has a sample.
    """
    precision, size = job.model.precision, len(block.images)
    images = finite(image_features(clip, block.images, precision, device)[: block.valid])
    texts = []
    for tokens in block.tokens.split(size):
        filled = torch.cat([tokens, tokens[-1:].expand(size - len(tokens), -1)])
        texts.append(text_features(clip, filled, precision, device)[: len(tokens)])
    return images, finite(torch.cat(texts))


def finite(features: Tensor) -> Tensor:
    """Returns a model's features. Raises InputError if they are not numbers, which would rank at random."""
    if not features.isfinite().all():
        raise InputError(
            "the model's features are not finite, as after a training that has diverged: choose another "
            "checkpoint"
        )
    return features
