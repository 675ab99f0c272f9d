"""Preflight of a run: checks of every host and of the network before the first step.

Every rank probes its host, all probe the network together, and all reach the same findings. At
a restart, nodes that have passed in this start a short while ago are not measured again.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from trainer.comm.accelerator import is_cuda, on_accelerator, uuid_of
from trainer.comm.backends import row_of
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.model.build import Clip
from trainer.preflight import gpu_probe, host_probe, network_probe
from trainer.preflight.findings import error_of, find_problems
from trainer.preflight.measurements import Finding, Measurements, Needs, Timing
from trainer.safe_io.plain import read_json
from trainer.sysinfo.shortage import SHARED_MEMORY, loader_bytes
from trainer.sysinfo.versions import PACKAGE, installed
from trainer.text.wording import many

_PAIR_BYTES = 1 << 24
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
        return json.dumps({**asdict(self), "ranks": len(self.measurements), "errors": len(self.errors)})


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
    on_cuda = is_cuda(comm.device)
    own = Measurements(
        rank=comm.world.rank,
        local_rank=comm.world.local_rank,
        node=comm.world.node,
        shm_bytes=host_probe.free_bytes(SHARED_MEMORY),
        open_files=host_probe.open_files(),
        disk_bytes=host_probe.disk_bytes(folder),
        clock_s=time.time(),
        locked_bytes=host_probe.locked_bytes(),
        wrong=wrong,
        timings={**timings, **copies},
        pairs=pairs,
        gpu=host_probe.gpu(uuid_of(comm.device)) if on_cuda else None,
        tflops=tflops,
        placement=host_probe.placement(uuid_of(comm.device)) if on_cuda else None,
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
    batch_bytes = batch_plan.micro_batch_size * clip.images.sample_bytes
    weights = _parameter_bytes(clip)
    return Needs(
        shm_bytes=loader_bytes(comm.world.local_size, job.data.workers, batch_bytes),
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


FRESH_S = 3600.0
"""Seconds for which the measurements of a node hold. A node may have degraded since then, and after so long
a time the seconds that new ones take are few.
"""


def has_passed(comm: Comm, figures: Path) -> bool:
    """Collective: returns whether earlier generations of this start have measured all nodes lately.

    `figures` is the file of the measurements in the run folder, which rank 0 reads.
    """
    if comm.world.generation == 1:
        return False
    nodes = set(comm.all_gather_object(comm.world.node))
    return bool(comm.broadcast_object(comm.world.rank == 0 and nodes <= _measured(figures)))


def check_again(comm: Comm) -> str:
    """Collective: runs each collective on known values, and returns a summary.

    Raises MachineError on all ranks alike if a value is wrong; UnfitNode if only one node of several is.
    """
    started = time.monotonic()
    gathered = comm.all_gather_object((comm.world.node, network_probe.wrong_collectives(comm)))
    nodes = {node for node, _ in gathered}
    problems = [
        (node, f"rank {rank} on {node}: {'; '.join(wrong)}")
        for rank, (node, wrong) in enumerate(gathered)
        if wrong
    ]
    if problems:
        text = f"collectives give wrong values: {'; '.join(problem for _, problem in problems)}"
        raise error_of(text, {node if len(nodes) > 1 else "" for node, _ in problems})
    seconds = time.monotonic() - started
    return f"the collectives again in {seconds:.1f} s; {many(len(nodes), 'node')} passed before"


def _measured(figures: Path) -> set[str]:
    """Returns the nodes that the file names and that were measured lately; none if it cannot be read."""
    try:
        rows = read_json(figures)["measurements"]
        return {row["node"] for row in rows if time.time() - float(row["clock_s"]) < FRESH_S}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
