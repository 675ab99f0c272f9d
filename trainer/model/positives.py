"""Positives of `optim.positives`: samples of a global batch that are in one group.

A number says of each sample in which (`trainer.data.groups`). UniCL (arXiv 2204.03610) spreads an image's
target evenly over the texts of its group, and a text's over the images. Letters are those of `loss.py`; a
block has R rows and C columns.
"""

import torch
from torch import Tensor


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
