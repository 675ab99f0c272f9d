"""A reducer for a single rank: its gradient is the whole gradient already, so nothing is copied or sent."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from trainer.comm.shards import Shards, WholeModel


class LocalReducer:
    """Implements `protocol.Reducer` for a world of one rank."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.shards: Shards = WholeModel(model)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        """Does nothing: the mean over one rank is its own gradient."""
