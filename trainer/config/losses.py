"""Rows of the losses that a job can name by `optim.loss`. Pure; imports no torch."""

from dataclasses import dataclass
from typing import Literal

LossName = Literal["clip", "siglip", "coca"]
Contrast = Literal["clip", "siglip"]
"""Ways to compare images with texts: a softmax over the batch, or a sigmoid for each pair."""
PositivesName = Literal["pairs", "captions", "images", "groups"]
"""Names of what the samples of a group share, which are positives of each other; pairs: nothing."""
POSITIVES: dict[PositivesName, str] = {
    "pairs": "",
    "captions": " with equal captions as positives",
    "images": " with equal images as positives",
    "groups": " with equal data.group_by as positives",
}
"""Clauses for people, behind the loss."""


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


NO_BIAS = (
    'has no logit bias, and optim.loss = "siglip" learns from the sigmoid of a teacher\'s logits: take one '
    'that was trained with a sigmoid, such as SigLIP, or set optim.loss = "clip"'
)
"""Reason for which siglip refuses a teacher whose logits were made for a softmax."""

LOSSES: dict[LossName, LossRow] = {
    "clip": LossRow("clip"),
    "siglip": LossRow("siglip", logit_scale_limit=None),
    "coca": LossRow("clip", captions=True),
}

TILE = 2048
"""Rows, and columns, of a tile of logits: 16 MiB of float32, in which a matrix product is fast."""


def in_tf32(precision: str, kernels: str) -> bool:
    """Returns whether products of tiles round their factors to TF32 on a GPU, by keys of `[model]`.

    Half precision has rounded the features' directions to fewer bits already.
    """
    return kernels == "fast" and precision in ("bf16", "fp16")
