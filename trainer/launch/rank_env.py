"""The environment of a rank, from one function for every way of starting it.

Reads nothing of this machine; imports no torch.
"""

from trainer.comm.backends import as_variables, row_of
from trainer.config import Job, Nccl
from trainer.world.variables import EXPECTED_SIZE


def rank_environment(job: Job, world_size: int, threads: int | None = None) -> dict[str, str]:
    """Returns the variables that every rank of the job gets.

    `threads` is the rank's share of cores; None takes resources.cpus_per_gpu.
    """
    variables = {
        EXPECTED_SIZE: str(world_size),  # a rank that sees another size stops
        # Without it each rank takes every core of the node.
        "OMP_NUM_THREADS": str(threads or job.resources.cpus_per_gpu),
        "PYTHONUNBUFFERED": "1",  # the last lines of a rank that is killed reach its log
        **_nccl(job.comm.nccl),
        **row_of(job).environment(job),
    }
    if job.model.compile:
        # Without it each rank starts one for each core of the node.
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = variables["OMP_NUM_THREADS"]
    if job.comm.timeline:
        variables["KINETO_LOG_LEVEL"] = "99"  # otherwise the profiler fills the console
    if job.offline:
        variables["HF_HUB_OFFLINE"] = "1"  # tokenizers would ask the hub even for cached files
    return variables | job.env


def _nccl(nccl: Nccl) -> dict[str, str]:
    names = nccl.socket_ifname or ""
    return as_variables(
        {
            "NCCL_SOCKET_IFNAME": nccl.socket_ifname,
            # Gloo takes exact names only.
            "GLOO_SOCKET_IFNAME": names.removeprefix("=") if names.startswith("=") else None,
            "NCCL_IB_HCA": nccl.ib_hca,
        }
    )
