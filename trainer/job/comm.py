"""`[comm]`: the library that ranks talk by, and its settings."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainer.job.fields import AboveZero, NonNegative, Positive, Section, Text, left_out

Backend = Literal["torch", "horovod"]


class TorchComm(Section):
    """DistributedDataParallel."""

    device_backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: nccl on GPUs, gloo on CPUs."""
    bucket_mb: AboveZero = 25.0
    """MiB of gradients that go into one all-reduce: larger ones use the network better, smaller ones overlap earlier."""
    static_graph: bool = False
    """The same parameters are used in every step: DDP may then skip its search. Not with accumulation."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets: saves one copy of them."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """Gradients travel at half the size, and lose what half precision cannot hold."""


class HorovodComm(Section):
    """Horovod; None leaves Horovod's own default."""

    fusion_mb: NonNegative | None = None
    """HOROVOD_FUSION_THRESHOLD, MiB (default 128): small tensors that become ready together travel together."""
    cycle_ms: AboveZero | None = None
    """HOROVOD_CYCLE_TIME, ms (default 1): how often ranks agree on what is ready."""
    cache_capacity: Annotated[int, Field(ge=0)] | None = None
    """HOROVOD_CACHE_CAPACITY, tensors (default 1024) whose negotiation is remembered."""
    compression: Literal["none", "fp16"] = "none"
    """Gradients travel as fp16."""
    hierarchical_allreduce: bool | None = None
    """HOROVOD_HIERARCHICAL_ALLREDUCE: within the node first, then between nodes."""
    hierarchical_allgather: bool | None = None
    """HOROVOD_HIERARCHICAL_ALLGATHER."""
    autotune: bool = False
    """HOROVOD_AUTOTUNE: tries fusion and cycle settings in the first steps. Runs then do not repeat bit for bit."""
    cpu_operations: Literal["mpi", "gloo"] | None = None
    """HOROVOD_CPU_OPERATIONS: what carries CPU tensors (default: mpi where started by MPI). gloo needs launcher = "horovodrun"."""


class Nccl(Section):
    """NCCL; None leaves NCCL's own choice. There is no NCCL_TIMEOUT: see [timeouts]."""

    socket_ifname: Text | None = None
    """NCCL_SOCKET_IFNAME: prefix of the interface; `=eth0` exactly, `^docker` all but."""
    ib_hca: Text | None = None
    """NCCL_IB_HCA: InfiniBand or RoCE adapters, `mlx5_0:1,mlx5_1:1`."""
    algo: Text | None = None
    """NCCL_ALGO: Ring, Tree, ..."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """NCCL_DEBUG."""


class Comm(Section):
    backend: Backend = "torch"
    launcher: Literal["auto", "torchrun", "mpirun", "horovodrun"] = "auto"
    """What starts ranks in `clipship run`. auto: torchrun for torch on one host, mpirun for Horovod and for several hosts."""
    deterministic: bool = False
    """Gradients are added up in fixed groups and order, and torch uses repeatable kernels: the same run gives the same bits. Slower."""
    find_unused_parameters: bool = False
    """For models that leave parameters out of some steps; costs a little in each step."""
    check_replicas_steps: Annotated[int, Field(ge=0)] = 0
    """Compare a checksum of parameters and optimizer state over the ranks every N steps; 0: at the start only."""
    timeline: tuple[Positive, Positive] | None = None
    """[FIRST, LAST]: record these steps on every rank, as Chrome traces in the run folder's `traces`: torch's profiler, and Horovod's own
    timeline of when it negotiated, fused and sent each tensor."""
    torch: TorchComm = left_out(TorchComm)
    horovod: HorovodComm = left_out(HorovodComm)
    nccl: Nccl = left_out(Nccl)

    @field_validator("timeline")
    @classmethod
    def _ordered(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError(f"its first step, {value[0]}, comes after its last, {value[1]}")
        return value
