"""Leaves out the random initial values of parameters that will be overwritten anyway.

Drawing them is most of the time in which a model is made: ranks that go on from a checkpoint or from a node's
memory need none of them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

_FILLS = frozenset({"uniform_", "normal_", "kaiming_uniform_", "erfinv_"})
"""Names of the functions and methods, of tensors and of torch.nn.init, with which random values are drawn in
place; `erfinv_` is the second part of a truncated normal distribution."""


class SkipRandomValues(TorchFunctionMode):
    """Context in which a new parameter keeps the contents of its memory in place of random values.

    Buffers and constant values are set as usual: not all of them are in a checkpoint.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function, unless it would fill a parameter with random values."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **kwargs)
