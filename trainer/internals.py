"""All private parts of other packages that Clipship uses: no other module touches any.

Each function says what would be lost without it. `tests/unit/test_internals.py` fails with the release that
changes one of them, and for a private part that another module touches.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

Spawn = Callable[[bytes, Sequence[Any], Sequence[int]], int]
"""(path of the program, its arguments, descriptors that it keeps) -> process id."""
TORCHS_LOOK_S = 5.0
"""Seconds after which torch looks whether a loader process is alive, in torch 2.6 to 2.15."""
spawn: Spawn = multiprocessing.util.spawnv_passfds
SCALER_TENSORS = {"_scale": "scale", "_growth_tracker": "_growth_tracker"}
"""Names of a scaler's tensors, with the names of their numbers in its state."""


_resize: Callable[..., object] = torch._C._nn._upsample_bicubic2d_aa
Tensors = list[Tensor] | tuple[Tensor, ...]


def resize_into(image: Tensor, out: Tensor) -> None:
    """Resizes uint8 [1, C, H, W] into `out`, uint8 [1, C, new H, new W]: bicubic with antialias.

    `torch.nn.functional.interpolate` calls this function and gives the same bytes, but in memory of its own:
    a copy would be a tenth of the time.
    """
    _resize(image, out.shape[2:], False, None, None, out=out)


def copy_all(targets: Tensors, sources: Tensors, *, non_blocking: bool = False) -> None:
    """Copies all tensors with a few kernels; one `copy_` each would launch hundreds."""
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def move_all(targets: Tensors, sources: Tensors, weight: Tensor) -> None:
    """Moves each target by a share of its way to the source, with a few kernels for all."""
    difference = torch._foreach_sub(sources, targets)
    torch._foreach_mul_(difference, weight.to(difference[0].dtype))
    torch._foreach_add_(targets, difference)


def found_inf(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Iterable[Tensor]:
    """Returns the marks of a step that the scaler leaves out, on the device.

    Without them the host would have to wait for the norm of the gradients in each step.
    """
    return scaler._found_inf_per_device(optimizer).values()


def leaves_out_by_itself(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's kernels leave a step out that the device finds to be not finite.

    It is torch's own mark of those that understand `found_inf`. Without it, the host waits in each step.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def scaler_tensor(scaler: torch.amp.GradScaler, name: str) -> Tensor | None:
    """Returns one of SCALER_TENSORS, None before the first step; `state_dict` makes the host wait for it."""
    value = getattr(scaler, name)
    return value if isinstance(value, Tensor) else None


def attention_of(config: Any) -> object:
    """Returns how a config of transformers computes attention, which may name code on a hub."""
    return getattr(config, "_attn_implementation", None)


def architectures_in_torch() -> str:
    """Returns the compute capabilities that torch has code for, as sm_80 sm_90.

    `torch.cuda.get_arch_list` knows them only where there is a GPU, and an image is built without one.
    """
    return torch._C._cuda_getArchFlags() or ""


def allow_graphs(count: int) -> None:
    """Lets torch.compile keep so many kernels of one function: blocks beyond its limit stay uncompiled."""
    import torch._dynamo

    limits = torch._dynamo.config
    limits.cache_size_limit = max(limits.cache_size_limit, count)


def compile_in_this_process() -> None:
    """Lets torch.compile start no process for each core. Its variable would be read only at the import."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


@contextmanager
def spawning_by(instead: Spawn) -> Iterator[None]:
    """Lets multiprocessing start its server by another function, in the block.

    A new interpreter, which it starts by itself, imports torch again: seconds before the first batch.
    """
    multiprocessing.util.spawnv_passfds = instead  # type: ignore[assignment]  # wider types
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]


def process_server() -> int:
    """Returns the process id of multiprocessing's server, which would stay unbound to its rank's CPUs."""
    return int(vars(multiprocessing.forkserver._forkserver)["_forkserver_pid"])


def name_resources(semaphores: str, folder: str | None) -> None:
    """Sets how the names of this process's semaphores begin, and the folder of its sockets.

    A rank that is killed leaves them behind, and its supervisor finds them by that.
    """
    settings = vars(multiprocessing.current_process())["_config"]
    settings["semprefix"] = semaphores
    if folder is not None:
        settings["tempdir"] = folder


def look_every(seconds: float) -> None:
    """Lets torch look that often whether a loader process that sends nothing is still alive.

    A loader process is no child of its rank, so no signal tells of its end: torch would see it after 5 s.
    """
    look = _MultiProcessingDataLoaderIter._try_get_data
    if look.__defaults__ == (TORCHS_LOOK_S,):
        look.__defaults__ = (seconds,)
