"""Table of accelerators: a row holds all that other modules need to know about one. Imports no torch.

What torch itself knows of a device is asked by `trainer.comm.accelerator`, by the row's `device_type`.
Sources: AMD, "GPU isolation techniques" and the device plugin's README (rocm.docs.amd.com,
github.com/ROCm/k8s-device-plugin); Huawei, Ascend Extension for PyTorch (gitcode.com/Ascend/pytorch) and
MindCluster's device plugin (www.hiascend.com).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from glob import glob
from os.path import exists
from typing import Any, Protocol

from trainer.sysinfo import nvml


class Monitor(Protocol):
    """Library that knows the state of a device from outside the process; `trainer.sysinfo.nvml` is one."""

    def gpus_here(self) -> list[nvml.GpuHere]: ...
    def visible_gpus(self, env: Mapping[str, str]) -> list[str]: ...
    def gpu_handle(self, uuid: object) -> Any: ...
    def pci_address(self, uuid: object) -> str | None: ...
    def counted_mj(self, handle: Any) -> int: ...
    def use_of(self, handle: Any) -> tuple[float, float]: ...


@dataclass(frozen=True)
class Accelerator:
    """One kind of device on which ranks compute."""

    name: str
    """Value of `resources.accelerator`; the CPU is chosen by `resources.device`."""
    title: str
    """Its name for people."""
    device_type: str
    """Name of such a device in torch."""
    collectives: str
    """Backend of torch.distributed that carries its tensors."""
    visible: tuple[str, ...] = ()
    """Variables that list the devices which a process sees; if the first is set, it decides alone."""
    given_by: tuple[str, ...] = ()
    """Further variables in which schedulers and containers name a process's devices."""
    torch_version: str | None = None
    """Attribute of torch.version that is set if torch is built for it."""
    plugin: str | None = None
    """Python module that teaches torch this device; a job that names the accelerator imports it."""
    device_files: str = ""
    """Pattern of its device files."""
    shown_by: tuple[str, ...] = ()
    """Files of which one exists if the machine has such a device."""
    tool: tuple[str, ...] = ()
    """Command that lists the devices."""
    kubernetes_resource: str = ""
    """Resource under which nodes of Kubernetes offer it."""
    gres: str = "gpu"
    """Generic resource under which Slurm offers it; --gpus-per-node counts those of gpu alone."""
    hidden_by: dict[str, str] = field(default_factory=dict)
    """Variables by which a container that asks for no device gets none."""
    apptainer: tuple[str, ...] = ()
    """Options by which apptainer lets a container use it."""
    pins_memory: bool = True
    """True if memory of the host can be page-locked for its copies."""
    monitor: Monitor | None = None
    """Library that tells its load, energy and place; None: these are not measured."""
    runs_cuda: bool = False
    """True if what is made for CUDA alone runs: kernels, graphs, TF32, cuDNN's choice, pinned state."""
    tried: bool = True
    """False if the row comes from documents alone."""

    @property
    def here(self) -> bool:
        """True if this machine shows a device file; whether torch can use the device is not known."""
        return any(map(exists, self.shown_by))

    @property
    def files(self) -> list[str]:
        """Device files of this machine."""
        return sorted(glob(self.device_files))

    @property
    def doubt(self) -> str:
        """Sentence for people about a row that nobody has tried; "" for the others."""
        return (
            ""
            if self.tried
            else f"not tried here: {self.title}. What Clipship does there follows from documents alone, and "
            "what is made for CUDA is off: compare the loss of a short run with one on the CPU first"
        )


CPU = Accelerator(name="cpu", title="the CPU", device_type="cpu", collectives="gloo", pins_memory=False)
CUDA = Accelerator(
    name="cuda",
    title="CUDA",
    device_type="cuda",
    collectives="nccl",
    visible=("CUDA_VISIBLE_DEVICES",),
    given_by=("SLURM_STEP_GPUS", "NVIDIA_VISIBLE_DEVICES"),
    torch_version="cuda",
    device_files="/dev/nvidia*",
    shown_by=("/dev/nvidiactl", "/dev/dxg"),  # under Windows (WSL 2) the second one shows it
    tool=("nvidia-smi", "-L"),
    kubernetes_resource="nvidia.com/gpu",
    # The image says "all", which NVIDIA's runtime grants even without a request.
    hidden_by={"NVIDIA_VISIBLE_DEVICES": "void"},
    apptainer=("--nv",),
    monitor=nvml,
    runs_cuda=True,
)
ROCM = Accelerator(
    name="rocm",
    title="ROCm",
    device_type="cuda",  # HIP has CUDA's place in torch, and RCCL that of NCCL
    collectives="nccl",
    visible=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    given_by=("SLURM_STEP_GPUS",),
    torch_version="hip",
    device_files="/dev/dri/renderD*",
    shown_by=("/dev/kfd",),
    tool=("rocm-smi", "--showid"),
    kubernetes_resource="amd.com/gpu",
    apptainer=("--rocm",),
    tried=False,
)
ASCEND = Accelerator(
    name="ascend",
    title="Ascend",
    device_type="npu",
    collectives="hccl",
    visible=("ASCEND_RT_VISIBLE_DEVICES",),
    given_by=("ASCEND_VISIBLE_DEVICES",),
    plugin="torch_npu",
    device_files="/dev/davinci[0-9]*",
    shown_by=("/dev/davinci_manager",),
    tool=("npu-smi", "info", "-l"),
    kubernetes_resource="huawei.com/Ascend910",
    gres="npu",
    tried=False,
)

ACCELERATORS: dict[str, Accelerator] = {row.name: row for row in (CUDA, ROCM, ASCEND, CPU)}
"""Rows by name. Of those that torch can use, the first is taken by a job that names none."""
GRES = {row.gres for row in ACCELERATORS.values()}
"""Generic resources of Slurm that are accelerators."""
