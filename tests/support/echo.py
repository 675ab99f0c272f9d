"""One rank whose others are made up, for tests of what one rank's share of a large world takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.world.launchers import World


class Echo:
    """Collectives whose other ranks have the tensors of this one; they allocate what real ones do."""

    def __init__(self, ranks: int, device: str) -> None:
        self.world = World(0, ranks, 0, ranks, "here", "test")
        self.device = torch.device(device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor.detach()] * self.world.size)

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        gathered = self.all_gather(tensor)
        return lambda: gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor.detach()[: len(tensor) // self.world.size].clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world.size
