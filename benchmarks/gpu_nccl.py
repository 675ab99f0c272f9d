"""NCCL's all-reduce over all GPUs of this machine: `python -m benchmarks.gpu_nccl`. The last line is JSON.

The bandwidth of the bus is that of NCCL's own tests: 2 (N - 1) / N of the bytes by the seconds, which depends
on the links and not on how many GPUs there are.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

MIB = (1, 25, 128, 1024)
"""Sizes of a call; 25 MiB is a bucket of gradients."""
_WARM, _TIMED = 5, 20


def rank() -> None:
    """Measures on one of the ranks that torchrun starts; the first prints."""
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", device_id=gpu)
    count, found = dist.get_world_size(), {}
    for size in MIB:
        tensor = torch.zeros(size * 2**19, dtype=torch.bfloat16, device=gpu)
        _seconds(tensor, _WARM)
        seconds = _seconds(tensor, _TIMED)
        found[f"{size}_mib_gb_s"] = round(2 * (count - 1) / count * size * 2**20 / seconds / 1e9, 1)
    if dist.get_rank() == 0:
        rates = ", ".join(f"{rate} with {name.partition('_')[0]} MiB" for name, rate in found.items())
        print(f"all-reduce over {count} GPUs, GB/s of the bus: {rates}")
        print(json.dumps({"gpus": count, **found}), flush=True)
    dist.destroy_process_group()


def _seconds(tensor: torch.Tensor, calls: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def main() -> None:
    """Starts the ranks, in place of this process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=gpu"]
    os.execv(sys.executable, [*torchrun, "-m", "benchmarks.gpu_nccl", "rank"])


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else rank()
