"""Chooses the device of a rank: its GPU, or the CPU if the job chooses the CPU or asks for no GPU.

A job that asked for GPUs never trains on the CPU instead: a driver that does not load would cost days and
look like success.
"""

import logging
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from trainer.config import Job
from trainer.errors import InputError
from trainer.text.wording import many
from trainer.world.launchers import World, device_index, devices_given

log = logging.getLogger("clipship")

NVIDIA_SMI_S = 10.0
"""Longest wait for nvidia-smi, in seconds: if the driver hangs, it never answers."""


def rank_device(job: Job, world: World, env: Mapping[str, str]) -> torch.device:
    """Returns the device on which this rank computes, and makes a GPU the current device.

    Raises InputError if the job or the launcher gave the rank a GPU and torch can use none here.
    """
    if job.resources.on_cpu:
        return torch.device("cpu")
    index = device_index(world, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if index is not None:
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if request := job.asks_for_gpus or devices_given(env):
        raise InputError(_refusal(request, world, env))
    if _device_files():
        log.warning(
            "%-12s the CPU is used although %s has GPUs: %s",
            "device",
            world.node,
            "; ".join(_observations(env)),
        )
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Returns `cpu`, or the driver's name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _refusal(request: str, world: World, env: Mapping[str, str]) -> str:
    observed = "".join(f"\n  {observation}" for observation in _observations(env))
    return (
        f"{request}, but rank {world.rank} on {world.node} cannot use a GPU. "
        "Clipship does not train on the CPU instead, since that would take far too long: repair the node, "
        f'or ask for the CPU with resources.device = "cpu". What the node shows:{observed}'
    )


def _observations(env: Mapping[str, str]) -> Iterator[str]:
    """Yields a line each for device files, nvidia-smi, CUDA_VISIBLE_DEVICES and torch's own reason."""
    yield f"/dev/nvidia*: {', '.join(_device_files()) or 'none'}"
    yield f"nvidia-smi: {_nvidia_smi()}"
    hidden = env.get("CUDA_VISIBLE_DEVICES")
    yield f"CUDA_VISIBLE_DEVICES: {'not set' if hidden is None else repr(hidden)}"
    yield f"torch {torch.__version__}: {_torch_reason()}"


def _device_files() -> list[str]:
    return sorted(str(path) for path in Path("/dev").glob("nvidia*"))


def _nvidia_smi() -> str:
    """Returns the first line that nvidia-smi prints, or why there is none.

    A process that SIGKILL does not end at once is left behind.
    """
    try:
        process = subprocess.Popen(
            ["nvidia-smi", "-L"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"cannot be started ({os.strerror(error.errno or 0)})"
    try:
        output, _ = process.communicate(timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"no answer within {NVIDIA_SMI_S:g} s"
    lines = output.strip().splitlines() or ["no output"]
    return lines[0] if process.returncode == 0 else f"exit code {process.returncode}: {lines[0]}"


def _torch_reason() -> str:
    if not torch.version.cuda:
        return "built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises RuntimeError, AssertionError or DeferredCudaCallError
        return str(error).partition("\n")[0]
    return f"CUDA {torch.version.cuda} starts and counts {many(torch.cuda.device_count(), 'GPU')}"
