"""Counts the bytes of the tensors that live, and their peak, on any device and without its allocator."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts, in its block, the storages of the tensors that operators of this thread return.

    It does not see what an operator needs only while it runs.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Storages of the `known` tensors lived before the block and do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = list(known)
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in self._known}
        self.now: int = 0
        self.peak: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
