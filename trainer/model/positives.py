"""Positives of `optim.positives = "captions"`: samples of a global batch whose captions are equal.

Captions are equal if the text tower gets the same tokens. Their features are then equal, too, so no model
could tell such samples apart. UniCL (arXiv 2204.03610) spreads an image's target evenly over the texts of its
group, and a text's over the images. Letters are those of `loss.py`; a block has R rows and C columns.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from trainer.model.packed_captions import Packed

_LONGEST = 4096
"""Most tokens of a caption, as `model.context_length` allows."""


class Positives:
    """Says which of all ranks' samples are positives of each other. The host waits for no device."""

    def __init__(self, group_N: Tensor) -> None:
        """`group_N` has a number for each sample, int64, which samples of one group share."""
        ordered_N = group_N.sort().values
        self._group_N = group_N
        self._count_N = torch.searchsorted(ordered_N, group_N, right=True) - torch.searchsorted(
            ordered_N, group_N
        )

    def same(self, row: int, column: int, block_RC: Tensor) -> Tensor:
        """Returns which pairs of a block of logits are positives, bool; `row` and `column` are its first."""
        rows, columns = block_RC.shape
        return self._group_N[row : row + rows, None] == self._group_N[column : column + columns]

    def target(self, row: int, column: int, block_RC: Tensor) -> Tensor:
        """Returns the target of each pair of the block: 1 / size of the group for positives, else 0."""
        count_R = self._count_N[row : row + len(block_RC)].to(block_RC.dtype)
        return self.same(row, column, block_RC) / count_R[:, None]


def caption_groups(tokens: Sequence[Tensor | Packed], padding: int) -> Tensor:
    """Returns a digest of each caption, int64, on the device: the group of its sample.

    `tokens` are those of this rank's micro-batches. The digest is a sum of tokens times random factors modulo
    2^64, to which padding adds nothing: however far captions are cut, equal ones have the same.
    """
    return torch.cat([_digest(part, padding) for part in tokens])


def _digest(tokens: Tensor | Packed, padding: int) -> Tensor:
    if isinstance(tokens, Packed):
        terms = (tokens.ids - padding) * _factors(tokens.ids.device)[tokens.positions]
        sums = torch.cat([terms.new_zeros(1), terms.cumsum(0)])
        return sums[tokens.ends + 1] - sums[tokens.starts[:-1]]
    return ((tokens - padding) * _factors(tokens.device)[: tokens.shape[1]]).sum(1)


@cache
def _factors(device: torch.device) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_LONGEST,), generator=draw).to(device)


def padding_of(model: nn.Module) -> int:
    """Returns the id of the tokens behind a caption's end; open_clip's own tokenizer has 0."""
    tower = getattr(model, "text", model)
    found = getattr(getattr(tower, "config", None), "pad_token_id", None)
    return int((getattr(tower, "pad_id", None) if found is None else found) or 0)
