"""The environment of a rank: one function, for every way of starting one. No torch, no reading of this machine."""

import math

from trainer.job import Comm, Job, Nccl, Timeouts
from trainer.world import EXPECTED_SIZE


def rank_environment(job: Job, world_size: int, threads: int | None = None) -> dict[str, str]:
    """Variables that every rank of the job gets; `threads` is its share of cores, None takes resources.cpus_per_gpu."""
    variables = {
        EXPECTED_SIZE: str(world_size),  # a rank that sees another world stops
        "OMP_NUM_THREADS": str(threads or job.resources.cpus_per_gpu),  # else each rank takes every core of the node
        "PYTHONUNBUFFERED": "1",  # the last lines of a rank that is killed reach its log
        **_nccl(job.comm.nccl),
        **(_horovod(job.comm) | _horovod_limits(job.timeouts) if job.comm.backend == "horovod" else _torch_limits(job.timeouts)),
    }
    if job.model.compile:
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = variables["OMP_NUM_THREADS"]  # else each rank starts one for each core of the node
    if job.comm.timeline:
        variables["KINETO_LOG_LEVEL"] = "99"  # else the profiler writes its own doings over the console
    if job.model.offline:
        variables["HF_HUB_OFFLINE"] = "1"  # tokenizers ask the hub even for what the cache holds
    return variables | job.env


def _torch_limits(timeouts: Timeouts) -> dict[str, str]:
    """For NCCL on GPUs: its own watchdogs come after ours, and leave a flight record. Elsewhere torch does not read them."""
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # a failed collective ends the process; 1 would abort work that the record still needs
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(math.ceil(timeouts.backstop_s) + 60),  # its 480 s could kill a rank within a longer phase
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # torch before 2.9 did not unless asked
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives that the flight recorder remembers; 0 in old versions
    }


def _horovod_limits(timeouts: Timeouts) -> dict[str, str]:
    """Horovod has no limit on a collective: it warns early, and gives up after our supervisors would have."""
    return {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, int(timeouts.step_s / 2))),  # it names the missing ranks
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(math.ceil(timeouts.backstop_s)),  # never, by default
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(timeouts.backstop_s)),  # its 30 s end a slow start, and any longer collective
    }


def _nccl(nccl: Nccl) -> dict[str, str]:
    return _given(
        {
            "NCCL_SOCKET_IFNAME": nccl.socket_ifname,
            "NCCL_IB_HCA": nccl.ib_hca,
            "NCCL_ALGO": nccl.algo,
            "NCCL_DEBUG": nccl.debug,
        }
    )


def _horovod(comm: Comm) -> dict[str, str]:
    horovod = comm.horovod
    return _given(
        {
            "HOROVOD_FUSION_THRESHOLD": None if horovod.fusion_mb is None else int(horovod.fusion_mb * 2**20),  # bytes
            "HOROVOD_CYCLE_TIME": horovod.cycle_ms,
            "HOROVOD_CACHE_CAPACITY": horovod.cache_capacity,
            "HOROVOD_HIERARCHICAL_ALLREDUCE": horovod.hierarchical_allreduce,
            "HOROVOD_HIERARCHICAL_ALLGATHER": horovod.hierarchical_allgather,
            "HOROVOD_AUTOTUNE": horovod.autotune or None,
            "HOROVOD_CPU_OPERATIONS": horovod.cpu_operations,
            "HOROVOD_TIMELINE": "DYNAMIC" if comm.timeline else None,  # off until the trainer starts it
        }
    )


def _given(settings: dict[str, str | int | float | None]) -> dict[str, str]:
    """Those that are set, as text; a bool becomes 1 or 0."""
    return {
        name: f"{value:g}" if isinstance(value, float) else str(int(value) if isinstance(value, bool) else value)
        for name, value in settings.items()
        if value is not None
    }
