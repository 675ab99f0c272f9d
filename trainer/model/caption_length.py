"""Decides how many tokens of each caption a micro-batch needs.

In a text tower whose tokens see only those before them, nothing behind the token that is pooled changes the
features or the gradient; in one that masks the padding, nothing behind the last other token does.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = TypeVar("Tokens", Tensor, NDArray[np.int64])

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
        ids_BL = tokens_BL.numpy()  # torch would wake threads for it, which then spin beside the loader
        if self.padding is None:
            return torch.from_numpy(pooled_place(ids_BL, self.end_token) + 1)
        places = np.arange(1, ids_BL.shape[1] + 1)
        return torch.from_numpy((places * (ids_BL != self.padding)).max(1).clip(min=1))


def pooled_place(tokens_BL: Tokens, end_token: int | None) -> Tokens:
    """Returns the place of the token that is pooled of each caption, int64 [B].

    It is the first end token, or without one the first token; for None it is the token with the largest id.
    """
    ids_BL: Any = tokens_BL if end_token is None else (tokens_BL == end_token) * 1
    places_B: Tokens = ids_BL.argmax(1)
    return places_B
