"""CUDA graphs without a GPU: what is captured is a list of torch's operators, and a replay runs them again.

Each operator then reads the same tensors as in the capture and writes its results over those of the capture,
as the kernels of a real graph do. What a captured region keeps outside of torch's operators is not replayed.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CpuGraph(TorchDispatchMode):
    """Stands in for `torch.cuda.CUDAGraph`."""

    replays = 0
    """Number of replays of all graphs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(out)))
        return out

    def capture_begin(self, _pool: object, **_: object) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def replay(self) -> None:
        """Runs all operators again."""
        CpuGraph.replays += 1
        for func, args, kwargs, results in self._calls:
            for held, fresh in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                # A view, and what an operator changes in place, are in their place already.
                if isinstance(held, Tensor) and held.data_ptr() != fresh.data_ptr():
                    held.copy_(fresh)


def use_cpu_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets jobs with `model.cuda_graphs` capture and replay on the CPU."""
    stream = SimpleNamespace(wait_stream=lambda _other: None)
    monkeypatch.setattr("trainer.model.cuda_graphs.is_cuda", lambda _device: True)
    for name, value in {
        "CUDAGraph": CpuGraph,
        "graph_pool_handle": object,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(CpuGraph, "replays", 0)
