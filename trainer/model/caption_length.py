"""Decides how many tokens of each caption a micro-batch needs.

In a text tower whose tokens see only those before them, nothing behind the token that is pooled changes the
features or the gradient; in one that masks the padding, nothing behind the last other token does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BUCKET = 8
"""Lengths are multiples of this, so that memory and libraries meet few shapes."""


@dataclass(frozen=True)
class CaptionLength:
    """Finds the shortest length that keeps all that counts of each caption."""

    end_token: int | None = None
    """Id of the token that is pooled, where it stands first; None: the token with the largest id."""
    padding: int | None = None
    """Id of the tokens behind a caption's end, in a tower that masks them; None: the pooled token counts."""
    packs: bool = False
    """True if the text tower takes packed captions, see `packed_captions`."""

    def __call__(self, tokens_BL: Tensor) -> int:
        """Returns a multiple of `BUCKET`, at most L. The token ids, int64, are on the host."""
        needed = int(self.needed(tokens_BL).max())
        return min(-(-needed // BUCKET) * BUCKET, tokens_BL.shape[1])

    def needed(self, tokens_BL: Tensor) -> Tensor:
        """Returns the number of tokens that count of each caption, int64 [B], at least 1."""
        if self.padding is not None:
            places = torch.arange(1, tokens_BL.shape[1] + 1)
            return (places * (tokens_BL != self.padding)).amax(dim=1).clamp(min=1)
        ids = tokens_BL if self.end_token is None else (tokens_BL == self.end_token).int()
        return ids.argmax(dim=1) + 1  # without an end token, the first token is pooled
