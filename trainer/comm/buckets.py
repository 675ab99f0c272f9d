"""Buckets of gradients: one flat tensor, and so one all-reduce, for many parameters. Names no library."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

_LAST = 8
"""The bucket that is full last has this part of the others' size: nothing hides its journey."""


class Bucket:
    """Gradients of some parameters of one dtype; each is a piece of one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, *, keep: bool) -> None:
        self.parameters, self._dtype, self._keep = parameters, dtype, keep
        self._flat: Tensor | None = None
        self._pieces: dict[int, Tensor] = {}
        self._filled: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(parameter.numel() for parameter in self.parameters) * self._dtype.itemsize

    @property
    def full(self) -> bool:
        """True once each parameter has filled its piece."""
        return len(self._filled) == len(self.parameters)

    def has(self, parameter: nn.Parameter) -> bool:
        """Returns whether the parameter has filled its piece."""
        return id(parameter) in self._filled

    def fill(self, parameter: nn.Parameter, factor: float) -> None:
        """Writes the parameter's gradient times the factor into its piece; zeros if it has none.

        The product is computed in the gradient's own dtype before it takes that of the bucket.
        """
        piece = self._piece(parameter)
        if parameter.grad is None:
            piece.zero_()
        else:
            torch.mul(parameter.grad, factor, out=piece)
            if piece.dtype == parameter.dtype:
                parameter.grad = piece  # so that there is one copy of it in memory
        self._filled.add(id(parameter))

    def flat(self) -> Tensor:
        """Returns the tensor that travels."""
        if self._flat is None:
            numbers = sum(parameter.numel() for parameter in self.parameters)
            self._flat = torch.empty(numbers, dtype=self._dtype, device=self.parameters[0].device)
            for parameter, part in zip(
                self.parameters, self._flat.split([p.numel() for p in self.parameters]), strict=True
            ):
                self._pieces[id(parameter)] = _shaped(part, parameter)
        return self._flat

    def _piece(self, parameter: nn.Parameter) -> Tensor:
        self.flat()
        return self._pieces[id(parameter)]

    def hand_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes the pieces the gradients of those parameters that are among the given ones, for one step."""
        shared = {id(parameter) for parameter in parameters}
        for parameter in self.parameters:
            piece = self._pieces[id(parameter)]
            if id(parameter) not in shared:
                continue
            if piece.dtype == parameter.dtype:
                parameter.grad = piece
            elif parameter.grad is None:
                parameter.grad = piece.to(parameter.dtype)
            else:
                parameter.grad.copy_(piece)
        self._filled.clear()
        if not self._keep:
            self._flat = None
            self._pieces = {}


def _shaped(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns the flat part with the shape and, if it has no gaps, the layout of the parameter."""
    dense = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, dense)


def buckets_of(
    parameters: Sequence[nn.Parameter], nbytes: int, dtype: torch.dtype | None, *, keep: bool
) -> list[Bucket]:
    """Returns buckets of at most so many bytes, or of one larger parameter.

    The parameters are in the order in which their gradients become ready. `dtype` is that in which
    gradients travel; None: each in its own. `keep` keeps the memory from step to step.
    """
    return [
        Bucket(group, dtype or group[0].dtype, keep=keep) for group in _groups(parameters, nbytes, dtype)
    ][::-1]


def _groups(
    parameters: Sequence[nn.Parameter], nbytes: int, dtype: torch.dtype | None
) -> Iterator[list[nn.Parameter]]:
    """Yields the groups from the last one on; the first ones that it yields are small."""
    group: list[nn.Parameter] = []
    size, limit = 0, nbytes // _LAST
    for parameter in reversed(parameters):
        own = parameter.numel() * (dtype or parameter.dtype).itemsize
        if group and (size + own > limit or parameter.dtype != group[0].dtype):
            yield group[::-1]
            group, size, limit = [], 0, min(2 * limit, nbytes)
        group.append(parameter)
        size += own
    if group:
        yield group[::-1]
