"""Preflight of a run: checks of every host and of the network before the first step.

Every rank probes its host, all probe the network together, and all reach the same findings.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.comm.accelerator import is_cuda, on_accelerator, uuid_of
from trainer.comm.backends import row_of
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.model.build import Clip
from trainer.preflight import gpu_probe, host_probe, network_probe
from trainer.preflight.findings import error_of, find_problems
from trainer.preflight.measurements import Finding, Gpu, Measurements, Needs, Placement, Timing
from trainer.sysinfo.versions import PACKAGE, installed
from trainer.text.wording import many

_PAIR_BYTES = 1 << 24
_BATCHES_PER_WORKER = 2  # that a loader process reads ahead
_BASE_FILES = 256  # for libraries, logs, pipes


@dataclass(frozen=True)
class PreflightReport:
    """Result of the preflight, equal on all ranks."""

    measurements: tuple[Measurements, ...]
    findings: tuple[Finding, ...]
    left_out: tuple[str, ...]
    """Names of what was not measured because time ran out."""
    seconds: float

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def raise_errors(self) -> None:
        """Raises MachineError, on all ranks alike, if a run cannot begin here.

        It is UnfitNode if a run could begin without one of the nodes.
        """
        if self.errors:
            raise error_of(
                "; ".join(finding.text for finding in self.errors),
                {finding.node for finding in self.errors},
            )

    def headline(self) -> str:
        """Returns a summary such as `0 errors, 1 warning in 2.1 s`."""
        warnings = len(self.findings) - len(self.errors)
        return f"{many(len(self.errors), 'error')}, {many(warnings, 'warning')} in {self.seconds:.1f} s"

    def as_json(self) -> str:
        """Returns the report as one line of JSON."""
        report: Mapping[str, Any] = {
            **asdict(self),
            "ranks": len(self.measurements),
            "errors": len(self.errors),
        }
        return json.dumps(report)


def preflight(job: Job, comm: Comm, batch_plan: BatchPlan, clip: Clip, folder: Path) -> PreflightReport:
    """Collective: probes this rank's host and the network between all ranks, within health.preflight_s.

    The model must be on its device.
    """
    started = time.monotonic()

    def time_is_up() -> bool:
        """Collective: returns whether time is up; rank 0's clock decides."""
        return bool(comm.broadcast_object(time.monotonic() - started > job.health.preflight_s))

    wrong = network_probe.wrong_collectives(comm)
    timings = network_probe.time_collectives(
        comm, _reduced_bytes(job, clip), _gathered_bytes(batch_plan, clip), time_is_up
    )
    pairs, measured = _pairs(comm, time_is_up)
    copies = _copies(comm.device)
    tflops = gpu_probe.product_tflops(comm.device)
    comm.barrier(job.timeouts.init_s)
    own = Measurements(
        rank=comm.world.rank,
        local_rank=comm.world.local_rank,
        node=comm.world.node,
        shm_bytes=host_probe.shared_memory_bytes(),
        open_files=host_probe.open_files(),
        disk_bytes=host_probe.disk_bytes(folder),
        clock_s=time.time(),
        locked_bytes=host_probe.locked_bytes(),
        wrong=wrong,
        timings={**timings, **copies},
        pairs=pairs,
        gpu=_gpu(comm.device),
        tflops=tflops,
        placement=_placement(comm.device),
        rdma=host_probe.rdma(os.environ) if on_accelerator(comm.device) else None,
        open_clip=installed(PACKAGE),
    )
    measurements = tuple(Measurements.from_table(table) for table in comm.all_gather_object(asdict(own)))
    left_out = tuple(name for name in ("latency", "all_gather", "all_reduce") if name not in timings) + (
        () if measured else ("pairs",)
    )
    return PreflightReport(
        measurements,
        tuple(find_problems(measurements, needs(job, comm, batch_plan, clip))),
        left_out,
        round(time.monotonic() - started, 3),
    )


def needs(job: Job, comm: Comm, batch_plan: BatchPlan, clip: Clip) -> Needs:
    """Returns a rough estimate of what the job needs on one node."""
    batches = job.data.workers * _BATCHES_PER_WORKER * comm.world.local_size
    weights = _parameter_bytes(clip)
    return Needs(
        shm_bytes=batches * batch_plan.micro_batch_size * clip.images.sample_bytes,
        open_files=_BASE_FILES + 4 * comm.world.size,
        checkpoint_bytes=weights + job.optim.state_values(weights),
        checkpoints=job.checkpoint.keep + 1 + (job.checkpoint.best is not None),
        fabric=job.resources.fabric if on_accelerator(comm.device) else None,
    )


def _pairs(comm: Comm, time_is_up: Callable[[], bool]) -> tuple[Mapping[str, Timing], bool]:
    positions = [
        tuple(position) for position in comm.all_gather_object((comm.world.node, comm.world.local_rank))
    ]
    if time_is_up():
        return {}, False
    return network_probe.time_pairs(comm, positions, _PAIR_BYTES, time_is_up), True


def _copies(device: torch.device) -> Mapping[str, Timing]:
    found = {
        "host to device": gpu_probe.time_copy(device),
        "within the GPU": gpu_probe.time_copy_within(device),
    }
    return {name: timing for name, timing in found.items() if timing is not None}


def _reduced_bytes(job: Job, clip: Clip) -> int:
    """Returns the bytes of the gradients that travel together, at most those of all parameters."""
    return int(min(row_of(job).reduced_mb(job.comm) * 2**20, _parameter_bytes(clip)))


def _gathered_bytes(batch_plan: BatchPlan, clip: Clip) -> int:
    """Bytes of one rank's image features in float32, which the preflight gathers."""
    tokens = clip.tokenizer(["a"]).to(next(clip.model.parameters()).device)
    with torch.no_grad():
        width = clip.model.encode_text(tokens).shape[-1]  # type: ignore[operator]
    return int(batch_plan.batch_size_per_rank * width * 4)


def _parameter_bytes(clip: Clip) -> int:
    return sum(parameter.numel() * 4 for parameter in clip.model.parameters())


def _gpu(device: torch.device) -> Gpu | None:
    return host_probe.gpu(uuid_of(device)) if is_cuda(device) else None


def _placement(device: torch.device) -> Placement | None:
    return host_probe.placement(uuid_of(device)) if is_cuda(device) else None
