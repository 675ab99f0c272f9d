"""`[resources]`: what a job asks of a cluster, with any scheduler."""

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from trainer.config.gpus import GPUS, Gpu, GpuName, measured_gpu
from trainer.config.keys import ON_GPUS, OnlyIf
from trainer.config.types import Gibibytes, Positive, Section
from trainer.sysinfo.accelerators import ACCELERATORS, CUDA, Accelerator

_WITH_SCHEDULER = OnlyIf(
    lambda job: bool(job.schedulers), "the job names no scheduler ([slurm], [kubernetes])"
)


def _rate(what: str) -> Any:
    # The reference walks over sections, and this table is a value of one: it says itself what it is.
    marks: dict[str, JsonValue] = {"x-resumed-run-may-change": True}
    return Field(gt=0, allow_inf_nan=False, description=what, json_schema_extra=marks)


class GpuRates(Section):
    """Rates of a GPU that `resources.gpu` does not know, as `clipship doctor` measures and prints them."""

    memory_gib: float = _rate("Memory that CUDA gives to programs, in GiB.")
    tflops: float = _rate("Matrix products in bf16, in 10^12 operations a second.")
    bandwidth_gb_s: float = _rate("Bytes that a copy within the GPU reads and writes, in 10^9 a second.")


class Resources(Section):
    """Resources that the job asks of a cluster. `clipship run` takes --nproc or --hosts instead."""

    nodes: Positive = 1
    """Nodes of the cluster that the job runs on."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs of a node, with one rank for each. If it is set, a rank without a GPU ends the run instead of
    computing on the CPU. 0: one rank per node, on the CPU. None: one rank per node, which takes a GPU if
    there is one."""
    device: Literal["gpu", "cpu"] | None = None
    """gpu: a rank that can use no GPU ends the run. cpu: ranks compute on the CPU even if there are GPUs; no
    GPUs are asked for, and gpus_per_node counts ranks. None: gpu if the launcher gave the rank GPUs, or if
    gpus_per_node is set (and neither slurm.gpus nor kubernetes.gpu_resource is "none"); else whatever the
    node has."""
    accelerator: Annotated[Literal["cuda", "rocm", "ascend"] | None, ON_GPUS] = None
    """Kind of device that the word GPU means in this job. rocm (AMD) and ascend (Huawei) were not tried:
    `clipship check` says so, and what is made for CUDA is off. None: cuda, unless a rank's torch is built for
    another one."""
    gpu: Annotated[GpuName | None, ON_GPUS] = None
    """Kind of GPU that the job will run on. `clipship check` then says what fits and how long it takes; no
    scheduler is asked for it."""
    gpu_rates: Annotated[GpuRates | None, ON_GPUS] = None
    """Rates of a GPU that `gpu` does not know, in its place, as `clipship doctor` measures and prints them:
    { memory_gib = 23.5, tflops = 71, bandwidth_gb_s = 870 }. GiB for programs, 10^12 operations a second of
    products in bf16, 10^9 bytes a second that a copy within the GPU reads and writes."""
    fabric: Annotated[Literal["ib", "roce", "efa", "tcpxo", "ethernet"] | None, ON_GPUS, _WITH_SCHEDULER] = (
        None
    )
    """Network between the nodes. On a cluster, ranks then get its variables and, for RDMA, may lock memory
    without a limit. `clipship fabrics explain NAME` says what follows from each. None: NCCL chooses."""
    cpus_per_gpu: Positive = 8
    """CPU cores for each GPU, or for each rank where there are no GPUs."""
    bind_cpus: Annotated[bool, ON_GPUS] = True
    """Bind each rank and its loader processes to the CPUs next to its GPU, unless its launcher has bound it,
    or they are fewer than cpus_per_gpu. On Slurm, srun is then told not to bind them, unless slurm.srun has
    cpu-bind. No effect without GPUs."""
    mem_gb_per_gpu: Annotated[Gibibytes | None, _WITH_SCHEDULER] = None
    """Host memory for each GPU, or for each rank without GPUs. None: the scheduler's own default."""

    @property
    def known_gpu(self) -> Gpu | None:
        """The facts of the GPU that the job names, or those it gives; None if it does neither."""
        return measured_gpu(**self.gpu_rates.model_dump()) if self.gpu_rates else GPUS.get(self.gpu or "")

    @property
    def row(self) -> Accelerator:
        """Row of the accelerator that the job means, as far as it is known before a rank starts."""
        return CUDA if self.accelerator is None else ACCELERATORS[self.accelerator]

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: one for each GPU, or one if there are no GPUs."""
        return self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def on_cpu(self) -> bool:
        """True if the job asks for the CPU explicitly."""
        return self.device == "cpu" or self.gpus_per_node == 0

    @model_validator(mode="after")
    def _one_device(self) -> "Resources":
        if self.device == "gpu" and self.gpus_per_node == 0:
            raise ValueError('device = "gpu" contradicts gpus_per_node = 0: remove one of the two')
        if self.gpu is not None and self.gpu_rates is not None:
            raise ValueError(f'gpu = "{self.gpu}" has its own rates: remove gpu or gpu_rates')
        for key, instead in (("gpu", "gpu_rates"), ("fabric", "variables in [env]")):
            if getattr(self, key) is not None and not self.row.runs_cuda:
                raise ValueError(
                    f'{key} = "{getattr(self, key)}" is a row of a table for CUDA, and accelerator = '
                    f'"{self.accelerator}": remove {key}; {instead} can say the same'
                )
        return self
