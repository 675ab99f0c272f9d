"""Chooses the device of a rank: its GPU, or the CPU if the job chooses the CPU or asks for no GPU.

A job that asked for GPUs never trains on the CPU instead: a driver that does not load would cost days and
look like success.
"""

import logging
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence

import torch

from trainer.comm.accelerator import built_for, chosen, memory_bytes, on_accelerator, runtime, usable_devices
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.errors import InputError
from trainer.sysinfo.accelerators import Accelerator
from trainer.text.wording import many
from trainer.world.launchers import World, device_index, devices_given

log = logging.getLogger("clipship")

TOOL_S = 10.0
"""Longest wait for nvidia-smi and its like, in seconds: if the driver hangs, they never answer."""


def rank_device(job: Job, world: World, env: Mapping[str, str]) -> torch.device:
    """Returns the device on which this rank computes, and makes a GPU the current device.

    Raises InputError if the job or the launcher gave the rank a GPU and torch can use none here.
    """
    if job.resources.on_cpu:
        return torch.device("cpu")
    row = chosen(job.resources.accelerator)
    index = device_index(world, usable_devices(row))
    if index is not None:
        device = torch.device(row.device_type, index)
        runtime(device).set_device(index)
        if row.doubt:
            log.warning("%-12s %s", "device", row.doubt)
        return device
    if request := job.asks_for_gpus or devices_given(env, row):
        raise InputError(_refusal(row, request, world, env))
    if row.files:
        log.warning(
            "%-12s the CPU is used although %s has GPUs: %s",
            "device",
            world.node,
            "; ".join(_observations(row, env)),
        )
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Returns `cpu`, or the driver's name of the GPU."""
    return str(runtime(device).get_device_name(device)) if on_accelerator(device) else "cpu"


def _refusal(row: Accelerator, request: str, world: World, env: Mapping[str, str]) -> str:
    observed = "".join(f"\n  {observation}" for observation in _observations(row, env))
    return (
        f"{request}, but rank {world.rank} on {world.node} cannot use a GPU. "
        "Clipship does not train on the CPU instead, since that would take far too long: repair the node, "
        f'or ask for the CPU with resources.device = "cpu". What the node shows:{observed}'
    )


def _observations(row: Accelerator, env: Mapping[str, str]) -> Iterator[str]:
    """Yields a line each for device files, the vendor's tool, variables and torch's own reason."""
    yield f"{row.device_files}: {', '.join(row.files) or 'none'}"
    yield f"{row.tool[0]}: {_said(row.tool)}"
    for name in row.visible:
        yield f"{name}: {repr(env[name]) if name in env else 'not set'}"
    yield f"torch {torch.__version__}: {_torch_reason(row)}"


def _said(tool: Sequence[str]) -> str:
    """Returns the first line that a command prints, or why there is none.

    A process that SIGKILL does not end at once is left behind.
    """
    try:
        process = subprocess.Popen(
            tool,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"cannot be started ({os.strerror(error.errno or 0)})"
    try:
        output, _ = process.communicate(timeout=TOOL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"no answer within {TOOL_S:g} s"
    lines = output.strip().splitlines() or ["no output"]
    return lines[0] if process.returncode == 0 else f"exit code {process.returncode}: {lines[0]}"


def _torch_reason(row: Accelerator) -> str:
    if not built_for(row):
        return f"built without {row.title}" if row.torch_version else f"{row.plugin} cannot be imported"
    module = runtime(torch.device(row.device_type))
    try:
        module.init()
    except Exception as error:  # torch raises RuntimeError, AssertionError or DeferredCudaCallError
        return str(error).partition("\n")[0]
    version = f" {getattr(torch.version, row.torch_version)}" if row.torch_version else ""
    return f"{row.title}{version} starts and counts {many(module.device_count(), 'GPU')}"


def smallest_gpu_bytes(comm: Comm) -> int | None:
    """Collective: returns the bytes of the smallest GPU of all ranks; None if a rank computes on a CPU."""
    own = memory_bytes(comm.device) if on_accelerator(comm.device) else None
    sizes = comm.all_gather_object(own)
    return None if None in sizes else min(int(size) for size in sizes if size is not None)
