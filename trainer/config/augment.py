"""`[data.augment]`: random changes of training images besides the crop's area, which is `data.crop_scale`."""

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from trainer.config.keys import OnlyIf
from trainer.config.types import NonNegative, Section

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


_WITH_OPS = OnlyIf(lambda job: job.data.augment.rand_augment_ops > 0, "data.augment.rand_augment_ops is 0")
_WITH_JITTER = OnlyIf(
    lambda job: job.data.augment.color_jitter_prob > 0, "data.augment.color_jitter_prob is 0"
)
_WITH_ERASING = OnlyIf(lambda job: job.data.augment.erase_prob > 0, "data.augment.erase_prob is 0")


class Augment(Section):
    """Random changes of training images; all follow from the seed and the sample's position in the epoch."""

    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest ratio of width to height of the random crop, before it is resized. For a tower
    that takes images of any shape (model.image_tokens), it is the crop's ratio over that of the image."""
    rand_augment_ops: Annotated[int, Field(ge=0, le=20)] = 0
    """Number of RandAugment's operations that are applied to an image, each drawn anew (torchvision's
    RandAugment). 0: none."""
    rand_augment_magnitude: Annotated[int, Field(ge=0, le=30), _WITH_OPS] = 9
    """Strength of RandAugment's operations, from 0 to 30."""
    color_jitter: Annotated[tuple[NonNegative, NonNegative, NonNegative, NonNegative], _WITH_JITTER] = (
        0.0,
        0.0,
        0.0,
        0.0,
    )
    """Largest change of brightness, contrast, saturation and hue, as torchvision's ColorJitter takes them: a
    factor is drawn between 1 - x and 1 + x, and for the hue a shift between -x and x, at most 0.5."""
    color_jitter_prob: Probability = 0.0
    """Share of images whose colours are changed by color_jitter."""
    gray_scale_prob: Probability = 0.0
    """Share of images that become gray."""
    erase_prob: Probability = 0.0
    """Share of images in which rectangles are filled with noise (random erasing, arXiv 1708.04896)."""
    erase_count: Annotated[int, Field(ge=1, le=100), _WITH_ERASING] = 1
    """Largest number of such rectangles in an image, between 1 and this. Together they cover 2 to 33 % of
    it."""

    @field_validator("crop_ratio")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1] < float("inf"):
            raise ValueError("must be two numbers, 0 < smallest <= largest")
        return value

    @model_validator(mode="after")
    def _fitting(self) -> "Augment":
        if self.color_jitter[3] > 0.5:
            raise ValueError("color_jitter: the hue's shift, the last number, must be at most 0.5")
        if self.color_jitter_prob and not any(self.color_jitter):
            raise ValueError(
                "color_jitter_prob has no effect without color_jitter: set it, for example to "
                "[0.32, 0.32, 0.32, 0.08]"
            )
        return self

    @property
    def changes_pixels(self) -> bool:
        """True if images are changed after the crop."""
        return bool(
            self.rand_augment_ops or self.color_jitter_prob or self.gray_scale_prob or self.erase_prob
        )
