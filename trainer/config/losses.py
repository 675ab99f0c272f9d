"""Rows of the losses that a job can name by `optim.loss`. Pure; imports no torch."""

from dataclasses import dataclass
from typing import Literal

LossName = Literal["clip", "siglip", "coca"]
Contrast = Literal["clip", "siglip"]
"""Ways to compare images with texts: a softmax over the batch, or a sigmoid for each pair."""


@dataclass(frozen=True)
class LossRow:
    """Row of a loss: its parts, and what it asks of the model."""

    contrast: Contrast
    captions: bool = False
    """True if the model also writes each caption, whose cross-entropy is added."""
    logit_scale_limit: float | None = 100.0
    """Largest logit scale, that of arXiv 2103.00020, section 2.5; None: no limit."""

    @property
    def has_bias(self) -> bool:
        """True if the model has a logit bias."""
        return self.contrast == "siglip"


LOSSES: dict[LossName, LossRow] = {
    "clip": LossRow("clip"),
    "siglip": LossRow("siglip", logit_scale_limit=None),
    "coca": LossRow("clip", captions=True),
}
