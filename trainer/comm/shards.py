"""Parameters as one rank holds them: whole, or only its own rows of each.

The optimizer, clipping and checkpoints work on these, so that they need not know which it is.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn


class Shards(Protocol):
    """This rank's part of a model."""

    parameters: Mapping[str, nn.Parameter]
    """Parameters by the model's names, which the optimizer updates in place.

    If they are split, these have the rows of this rank alone, perhaps none.
    """
    split: frozenset[str]
    """Names of the parameters that are split by rows over ranks; empty if each rank has all of the model."""
    part: str
    """Name of this rank's part, the same on ranks that hold the same rows; empty if nothing is split."""

    def state(self) -> Mapping[str, Tensor]:
        """Returns the tensors of the model's state dict, of split ones this rank's rows. They are no copies.

        Not collective.
        """

    def whole(self, name: str, rows: Tensor) -> Tensor:
        """Collective: returns all rows of a tensor that is split as parameter `name` is."""

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor as a view, or all if `name` is not split. Not collective."""

    def grad_norm(self) -> Tensor:
        """Collective: returns the norm of the whole gradient, a scalar with the same bits on every rank."""

    def gathered(self) -> AbstractContextManager[None]:
        """Collective: returns a context in which every rank has the whole model.

        It is for passes without gradients. Ranks may then make different numbers of passes, also of parts of
        the model.
        """


class WholeModel:
    """Implements `Shards` for ranks that each have all of the model."""

    split: frozenset[str] = frozenset()
    part = ""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())

    def state(self) -> Mapping[str, Tensor]:
        tensors: Mapping[str, Tensor] = self._model.state_dict()
        return tensors

    def whole(self, name: str, rows: Tensor) -> Tensor:
        return rows

    def own(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def grad_norm(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        return nn.utils.get_total_norm(gradients, foreach=True)

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()
