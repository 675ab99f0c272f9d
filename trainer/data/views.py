"""Views: augmented pictures of a sample that a teacher sees beforehand, and the student in training.

A view follows from the job's seed, the shard's name, the sample's key and the view's number, and from nothing
else: filters, order and epoch change none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.data.feature_files import key_text, stem
from trainer.data.order import position_seed
from trainer.data.pixels import RandomCrop, normalised
from trainer.data.sample import RawSample
from trainer.errors import InputError


def view_seed(seed: int, raw: RawSample, view: int) -> int:
    """Returns the seed of a view's crop and changes."""
    return position_seed(seed, 0, view, f"view of {stem(raw.origin)}/{key_text(raw.key)}")


def crop_of_views(crop: object) -> RandomCrop:
    """Returns the crop by which views are cut, the same part for a model of any image size.

    Raises InputError for a model that takes images of any shape.
    """
    if not isinstance(crop, RandomCrop):
        raise InputError("views are pictures of one size, and a model with model.image_tokens takes none")
    return replace(crop, of_any_size=True)


@dataclass(frozen=True)
class Views:
    """Function from a sample to its views as the model takes them, float32 [views, 3, height, width]."""

    crop: RandomCrop
    count: int
    seed: int
    """Seed of the job that is to train on them."""
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, raw: RawSample) -> Tensor:
        pictures = [self.crop(raw, view_seed(self.seed, raw, view)) for view in range(self.count)]
        return normalised(torch.stack(pictures), torch.tensor(self.mean), torch.tensor(self.std))
