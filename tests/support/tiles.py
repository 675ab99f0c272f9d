"""Losses in tiles that are smaller than a test's batch, and losses without tiles."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def tiles_of(rows: int) -> Iterator[None]:
    """Cuts logits into tiles of so many rows; 0: computes them whole, as for a loss that has no tiles.

    All threads are affected.
    """
    with pytest.MonkeyPatch.context() as patch:
        if rows:
            patch.setattr("trainer.model.rank_loss.TILE", rows)
        else:
            patch.setattr("trainer.model.rank_loss.TILED_SHARES", {})
        yield
