"""Features of images and texts, as every evaluation takes them. Names neither torch.distributed nor Horovod."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.job import Precision
from trainer.model import Clip, autocast


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards the model is in the mode of before."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def image_features(clip: Clip, images: Tensor, precision: Precision, device: torch.device) -> Tensor:
    """Unit vectors [n, D] of images [n, 3, H, W], in the precision of the forward pass."""
    images = images.to(device, torch.float64 if precision == "fp64" else images.dtype)
    with autocast(device, precision):
        features: Tensor = clip.model.encode_image(images, normalize=True)  # type: ignore[operator]
    return features


def text_features(clip: Clip, tokens: Tensor, precision: Precision, device: torch.device) -> Tensor:
    """Unit vectors [n, D] of tokens [n, L], in the precision of the forward pass."""
    with autocast(device, precision):
        features: Tensor = clip.model.encode_text(tokens.to(device), normalize=True)  # type: ignore[operator]
    return features
