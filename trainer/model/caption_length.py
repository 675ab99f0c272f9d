"""Decides how many tokens of each caption a micro-batch needs.

In a text tower whose tokens see only those before them, nothing behind the token that is pooled changes the
features or the gradient. In one that masks the padding, nothing behind the last other token does.
"""

from dataclasses import dataclass

from torch import Tensor

BUCKET = 8
"""Lengths are multiples of this, so that memory and libraries meet few shapes."""


@dataclass(frozen=True)
class CaptionLength:
    """Finds the shortest length that keeps what counts of each caption."""

    end_token: int | None = None
    """Id of the token that is pooled, where it stands first; None: the token with the largest id."""
    padding: int | None = None
    """Id of the tokens that are masked; None: none are, and the pooled token decides."""

    def __call__(self, tokens_BL: Tensor) -> int:
        """Returns a multiple of `BUCKET`, at most L. The token ids, int64, are on the host."""
        needed = self._pooled(tokens_BL) if self.padding is None else self._seen(tokens_BL, self.padding)
        return min(-(-needed // BUCKET) * BUCKET, tokens_BL.shape[1])

    def _pooled(self, tokens_BL: Tensor) -> int:
        ids = tokens_BL if self.end_token is None else (tokens_BL == self.end_token).int()
        return int(ids.argmax(dim=1).max()) + 1  # without an end token, the first token is pooled

    def _seen(self, tokens_BL: Tensor, padding: int) -> int:
        seen = (tokens_BL != padding).any(dim=0).nonzero()
        return int(seen[-1]) + 1 if len(seen) else 1
