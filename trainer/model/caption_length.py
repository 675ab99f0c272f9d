"""Decides how many tokens of each caption a micro-batch needs.

In a text tower whose tokens see only those before them, nothing behind the token that is pooled changes the
features or the gradient.
"""

from dataclasses import dataclass

from torch import Tensor

BUCKET = 8
"""Lengths are multiples of this, so that memory and libraries meet few shapes."""


@dataclass(frozen=True)
class CaptionLength:
    """Finds the shortest length that keeps the pooled token of each caption."""

    end_token: int | None = None
    """Id of the token that is pooled, where it stands first; None: the token with the largest id."""

    def __call__(self, tokens_BL: Tensor) -> int:
        """Returns a multiple of `BUCKET`, at most L. The token ids, int64, are on the host."""
        ids = tokens_BL if self.end_token is None else (tokens_BL == self.end_token).int()
        needed = int(ids.argmax(dim=1).max()) + 1  # without an end token, the first token is pooled
        return min(-(-needed // BUCKET) * BUCKET, tokens_BL.shape[1])
