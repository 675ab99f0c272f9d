"""The environment of a rank: one function, for every way of starting one. No torch, no reading of this machine."""

import math

from trainer.job import HorovodComm, Job, Nccl
from trainer.world import EXPECTED_SIZE


def rank_environment(job: Job, world_size: int, threads: int | None = None) -> dict[str, str]:
    """Variables that every rank of the job gets; `threads` is its share of cores, None takes resources.cpus_per_gpu."""
    variables = {
        EXPECTED_SIZE: str(world_size),  # a rank that sees another world stops
        "OMP_NUM_THREADS": str(threads or job.resources.cpus_per_gpu),  # else each rank takes every core of the node
        "PYTHONUNBUFFERED": "1",  # the last lines of a rank that is killed reach its log
        **_nccl(job.comm.nccl),
    }
    if job.comm.backend == "horovod":
        variables |= _horovod(job.comm.horovod)
        variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(
            math.ceil(job.timeouts.init_s)
        )  # its own 30 s is less than a slow start of many ranks
    if job.model.offline:
        variables["HF_HUB_OFFLINE"] = "1"  # tokenizers ask the hub even for what the cache holds
    return variables


def _nccl(nccl: Nccl) -> dict[str, str]:
    return _given(
        {
            "NCCL_SOCKET_IFNAME": nccl.socket_ifname,
            "NCCL_IB_HCA": nccl.ib_hca,
            "NCCL_ALGO": nccl.algo,
            "NCCL_DEBUG": nccl.debug,
        }
    )


def _horovod(horovod: HorovodComm) -> dict[str, str]:
    return _given(
        {
            "HOROVOD_FUSION_THRESHOLD": None if horovod.fusion_mb is None else int(horovod.fusion_mb * 2**20),  # bytes
            "HOROVOD_CYCLE_TIME": horovod.cycle_ms,
            "HOROVOD_CACHE_CAPACITY": horovod.cache_capacity,
            "HOROVOD_HIERARCHICAL_ALLREDUCE": horovod.hierarchical_allreduce,
            "HOROVOD_HIERARCHICAL_ALLGATHER": horovod.hierarchical_allgather,
            "HOROVOD_AUTOTUNE": horovod.autotune or None,
            "HOROVOD_CPU_OPERATIONS": horovod.cpu_operations,
        }
    )


def _given(settings: dict[str, str | int | float | None]) -> dict[str, str]:
    """Those that are set, as text; a bool becomes 1 or 0."""
    return {
        name: f"{value:g}" if isinstance(value, float) else str(int(value) if isinstance(value, bool) else value)
        for name, value in settings.items()
        if value is not None
    }
