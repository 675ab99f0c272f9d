"""Trains one rank on an accelerator that the table does not have: `python -m ... JOB RECORD`.

To torch its device is a third one beside cpu and cuda, with a type, streams and events of its own. Its memory
is the host's, and the CPU's operators compute on it, so that the losses must be those of the CPU. RECORD gets
how often each operator ran on it.
"""

import json
import sys
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from trainer.errors import EXIT_FAILED
from trainer.sysinfo.accelerators import ACCELERATORS, Accelerator
from trainer.train import main as train

NAME = "fake"
ROW = Accelerator(
    name=NAME,
    title="Fake",
    device_type=NAME,
    collectives="gloo",
    visible=("FAKE_VISIBLE_DEVICES",),
    pins_memory=False,
    tried=False,
)
CALLS: Counter[str] = Counter()


class OnFake(torch.Tensor):
    """A tensor of the device, which holds one of the CPU."""

    inner: Any
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnFake":
        make: Any = torch.Tensor._make_wrapper_subclass
        made: OnFake = make(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    def record_stream(self, s: Any) -> None:
        assert isinstance(s, Stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return computed(func, *args, **(kwargs or {}))


def computed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what an operator gives, from the tensors inside; one that it changes stays the same tensor."""
    CALLS[str(op)] += 1
    given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, OnFake)]
    outer = {id(each.inner): each for each in given}
    inner_args, inner_kwargs = pytree.tree_map(_inside, (args, kwargs))
    result = op(*inner_args, **inner_kwargs)
    if str(kwargs.get("device", NAME)).startswith("cpu"):
        return result
    return pytree.tree_map_only(
        torch.Tensor, lambda found: outer[id(found)] if id(found) in outer else OnFake(found), result
    )


def _inside(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value.inner if isinstance(value, OnFake) else value


class Event:
    """A moment of the device, which does its work at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return (end.at - self.at) * 1000


class Stream:
    """An order of work on the device, of which nobody has to wait."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == NAME

    def record_event(self) -> Event:
        CALLS["streams"] += 1
        return Event()

    def wait_event(self, event: Event) -> None: ...


class Module:
    """Has the place of torch.cuda: the names that the training calls, each of which torch documents."""

    def __init__(self) -> None:
        self.index: int | None = None

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.index is not None

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        self.index = index

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object) -> str:
        return "Fake Accelerator"

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**33)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def synchronize(self, device: object = None) -> None:
        CALLS["synchronize"] += 1

    Event: type = Event
    Stream: type = Stream

    def current_stream(self, device: torch.device) -> Any:
        return Stream(device)

    def stream(self, stream: object) -> "nullcontext[None]":
        return nullcontext()

    def manual_seed(self, seed: int) -> None:
        CALLS["manual_seed"] += 1

    def manual_seed_all(self, seed: int) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False


def register() -> None:
    """Makes the device known to torch, and its row to the table: all that a new accelerator does."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    library.fallback(computed, "PrivateUse1")
    for overload in ("default", "start", "start_step"):  # torch would give an empty tensor another shape
        arange = getattr(torch.ops.aten.arange, overload)
        counted.impl(arange, partial(computed, arange), "PrivateUse1")
    ACCELERATORS[NAME] = ROW


library, counted = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")

if __name__ == "__main__":
    register()
    code = EXIT_FAILED
    try:
        code = train.main(Path(sys.argv[1]))
    finally:
        Path(sys.argv[2]).write_text(json.dumps(CALLS))
    sys.exit(code)
