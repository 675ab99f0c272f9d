"""`[comm]`: the library that ranks communicate by, and its settings."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainer.config.keys import ON_GPUS, OnlyIf
from trainer.config.types import AboveZero, Mebibytes, Positive, Section, Text, optional_section

Backend = Literal["torch", "fsdp", "horovod"]
ShardDegree = Literal["auto", "world", "node"] | Positive


def _read_by(*backends: Backend) -> OnlyIf:
    """Returns the condition of a key or section that only these backends read."""
    return OnlyIf(lambda job: job.comm.backend in backends, 'comm.backend is "{job.comm.backend}"')


_DDP = _read_by("torch")
_TORCH = _read_by("torch", "fsdp")
_USUAL_SUM = OnlyIf(
    lambda job: not job.comm.deterministic, "comm.deterministic = true adds gradients up in another way"
)
_OVER_NCCL = OnlyIf(
    lambda job: not _TORCH.used(job) or job.comm.torch.device_backend != "gloo",
    'comm.torch.device_backend = "gloo" does without NCCL',
)


class TorchComm(Section):
    """Settings of torch's DistributedDataParallel (DDP)."""

    device_backend: Annotated[Literal["auto", "nccl", "gloo"], _TORCH] = "auto"
    """Backend of torch.distributed, for fsdp, too; auto takes nccl on GPUs and gloo on CPUs."""
    bucket_mb: Annotated[Mebibytes, _DDP, _USUAL_SUM] = 25.0
    """MiB of gradients in one all-reduce: larger buckets use the network better, smaller ones overlap earlier
    with the backward pass."""
    static_graph: Annotated[bool, _DDP, _USUAL_SUM] = False
    """Promises that every step uses the same parameters, so that DDP may skip its search for unused ones.
    Excludes accumulation."""
    gradient_as_bucket_view: Annotated[bool, _DDP, _USUAL_SUM] = True
    """Keep gradients as views of the buckets, which saves one copy of them."""
    compression: Annotated[Literal["none", "fp16", "bf16"], _DDP, _USUAL_SUM] = "none"
    """Send gradients in half precision: half the traffic, but values are rounded to it."""


class FsdpComm(Section):
    """Settings of torch's FSDP2 (fully sharded data parallel)."""

    shard_degree: ShardDegree = "auto"
    """Number of consecutive ranks that together hold the model once. "world": all ranks. "node": those of a
    node, with a copy on each node (HSDP, hybrid sharding): more memory, less traffic between nodes. "auto":
    "node" if there are several nodes of at least 8 ranks each, else "world". A number must divide the number
    of ranks."""
    reshard_after_forward: bool = True
    """Let the gathered parameters of a block go after its forward pass, and gather them again for its
    backward pass. false saves a third of the traffic and keeps the whole model in memory in between."""
    param_dtype: Literal["auto", "fp32"] = "auto"
    """Type in which parameters are gathered and used. auto: on GPUs the half precision of model.precision,
    which halves the traffic; parameters and optimizer stay in fp32. Elsewhere, and with batch norm, the
    parameters' own."""
    reduce_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type in which gradients are added up over the ranks (float64 stays as it is)."""


class HorovodComm(Section):
    """Settings of Horovod; None keeps Horovod's own default, where no other is named."""

    hatch = "If it is a variable of Horovod, set it in [env]: HOROVOD_{variable}"

    fusion_mb: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    """MiB of gradients in one all-reduce (default 25): larger buckets use the network better, smaller ones
    overlap earlier with the backward pass; 0 sends each parameter's alone. Horovod's own fusion, which
    copies gradients once more, is off."""
    cycle_ms: AboveZero | None = None
    """HOROVOD_CYCLE_TIME in ms: time between two rounds in which ranks agree on which tensors are ready. The
    default is 5 without GPUs, and with them 0.25 over MPI and 1 over Gloo: shorter waits for more of a core.
    """
    compression: Annotated[Literal["none", "fp16"], _USUAL_SUM] = "none"
    """Send gradients as fp16."""
    hierarchical_allreduce: bool | None = None
    """HOROVOD_HIERARCHICAL_ALLREDUCE: reduce within each node first, then between nodes."""
    hierarchical_allgather: bool | None = None
    """HOROVOD_HIERARCHICAL_ALLGATHER: gather within each node first, then between nodes."""
    cpu_operations: Literal["mpi", "gloo"] | None = None
    """HOROVOD_CPU_OPERATIONS: library that carries CPU tensors: MPI's, if MPI connects the ranks, which
    launcher = "mpirun" means, else gloo."""


class Nccl(Section):
    """Settings of NCCL; None keeps NCCL's own choice. NCCL has no NCCL_TIMEOUT: see [timeouts]."""

    hatch = "If it is a variable of NCCL, set it in [env]: NCCL_{variable}"

    socket_ifname: Text | None = None
    """NCCL_SOCKET_IFNAME: prefix of the network interface's name; `=eth0` means exactly eth0, `^docker` all
    but those."""
    ib_hca: Annotated[Text | None, ON_GPUS, _OVER_NCCL] = None
    """NCCL_IB_HCA: InfiniBand or RoCE adapters, such as `mlx5_0:1,mlx5_1:1`."""


class Comm(Section):
    """Library that ranks communicate by, its launcher and its settings."""

    backend: Backend = "torch"
    """Library that averages gradients over the ranks: torch DistributedDataParallel, torch FSDP2 (which also
    splits the model over them) or Horovod."""
    launcher: Literal["auto", "clipship", "mpirun"] = "auto"
    """Program that starts the ranks, over ssh on other hosts: Clipship itself or Open MPI's. For Horovod it
    also says what connects them, in pods and under srun, too: Gloo, at an address that rank 0 serves, or MPI.
    auto takes clipship, but for Horovod on several hosts mpirun, unless recovery.max_restarts is set and
    there are at most 32 ranks: MPI ends all ranks when one is gone; over Gloo they agree in a ring on what is
    ready, and each asks rank 0 for the address of each other, which takes 30 s for 256 ranks and 8 minutes
    for 1,024. On one host nothing then listens beyond loopback; under mpirun Open MPI's own daemon does.
    Ranks of torch that torchrun starts need no key: see `clipship train --help`."""
    deterministic: bool = False
    """Add up gradients in fixed groups and order, and use torch's deterministic kernels: the same run gives
    the same bits. Slower."""
    find_unused_parameters: bool = False
    """Allow models that leave parameters out of some steps; costs some time in each step."""
    check_replicas_steps: Annotated[int, Field(ge=0)] = 0
    """Compare a checksum of parameters and optimizer state over the ranks every N steps; 0: only at the
    start."""
    timeline: tuple[Positive, Positive] | None = None
    """[FIRST, LAST]: record these steps on every rank as Chrome traces, in the run folder's `traces`. They
    come from torch's profiler, and from Horovod's own timeline of when it negotiated, fused and sent each
    tensor."""
    torch: TorchComm = optional_section(TorchComm)
    fsdp: Annotated[FsdpComm, _read_by("fsdp")] = optional_section(FsdpComm)
    horovod: Annotated[HorovodComm, _read_by("horovod")] = optional_section(HorovodComm)
    nccl: Nccl = optional_section(Nccl)

    @field_validator("timeline")
    @classmethod
    def _ordered(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError(f"the first step, {value[0]}, must not be after the last one, {value[1]}")
        return value
