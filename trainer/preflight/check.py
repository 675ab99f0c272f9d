"""The preflight of a run: every rank reads its place, all try the wire together, and all come to the same findings."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.comm.protocol import Comm
from trainer.data.pixels import BYTES_OF_A_PIXEL
from trainer.errors import Unfit
from trainer.job import Job
from trainer.model import Clip
from trainer.plan import Plan
from trainer.preflight import place, wire
from trainer.preflight.judge import Needs, judge
from trainer.preflight.reading import Finding, Gpu, Reading, Timing
from trainer.wording import many

_PAIR_BYTES = 1 << 24
_HOROVOD_FUSION_MB = 128  # its default
_BATCHES_PER_WORKER = 2  # that a loader process works ahead
_BASE_FILES = 256  # libraries, logs, pipes


@dataclass(frozen=True)
class Report:
    """What the preflight found, equal on all ranks."""

    readings: tuple[Reading, ...]
    findings: tuple[Finding, ...]
    left_out: tuple[str, ...]
    """What was not measured, for the time was up."""
    seconds: float

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def raise_errors(self) -> None:
        """Raises Unfit, on all ranks alike, where a run cannot begin here."""
        if self.errors:
            raise Unfit("; ".join(finding.text for finding in self.errors))

    def headline(self) -> str:
        """`0 errors, 1 warning in 2.1 s`."""
        warnings = len(self.findings) - len(self.errors)
        return f"{many(len(self.errors), 'error')}, {many(warnings, 'warning')} in {self.seconds:.1f} s"

    def as_json(self) -> str:
        """One line."""
        found: Mapping[str, Any] = {**asdict(self), "ranks": len(self.readings), "errors": len(self.errors)}
        return json.dumps(found)


def preflight(job: Job, comm: Comm, cut: Plan, clip: Clip, folder: Path) -> Report:
    """Collective: look at this rank's place and at the wire between all, within health.preflight_s. The model is on its device."""
    started = time.monotonic()

    def enough() -> bool:
        """Collective: rank 0's clock speaks for all."""
        return bool(comm.broadcast_object(time.monotonic() - started > job.health.preflight_s))

    wrong = wire.wrong_collectives(comm)
    timings = wire.time_collectives(comm, _reduced_bytes(job, clip), _gathered_bytes(cut, clip), enough)
    pairs, measured = _pairs(comm, enough)
    copy = wire.time_copy(comm.device)
    comm.barrier(job.timeouts.init_s)
    reading = Reading(
        rank=comm.world.rank,
        local_rank=comm.world.local_rank,
        node=comm.world.node,
        shm_bytes=place.shared_memory_bytes(),
        open_files=place.open_files(),
        disk_bytes=place.disk_bytes(folder),
        clock_s=time.time(),
        wrong=wrong,
        timings=timings if copy is None else {**timings, "host to device": copy},
        pairs=pairs,
        gpu=_gpu(comm.device),
    )
    readings = tuple(comm.all_gather_object(reading))
    left_out = tuple(name for name in ("latency", "all_gather", "all_reduce") if name not in timings) + (() if measured else ("pairs",))
    return Report(readings, tuple(judge(readings, needs(job, comm, cut, clip))), left_out, round(time.monotonic() - started, 3))


def needs(job: Job, comm: Comm, cut: Plan, clip: Clip) -> Needs:
    """What the job takes on one node, roughly."""
    side = getattr(getattr(clip.model, "visual", None), "image_size", 224)
    height, width = side if isinstance(side, tuple | list) else (side, side)
    batches = job.data.workers * _BATCHES_PER_WORKER * comm.world.local_size
    return Needs(
        shm_bytes=batches * cut.micro_batch_size * BYTES_OF_A_PIXEL * height * width,
        open_files=_BASE_FILES + 4 * comm.world.size,
        checkpoint_bytes=3 * _parameter_bytes(clip),  # weights and AdamW's two moments
        checkpoints=job.checkpoint.keep + 1 + (job.checkpoint.best is not None),
    )


def _pairs(comm: Comm, enough: Callable[[], bool]) -> tuple[Mapping[str, Timing], bool]:
    places = [tuple(found) for found in comm.all_gather_object((comm.world.node, comm.world.local_rank))]
    if enough():
        return {}, False
    return wire.time_pairs(comm, places, _PAIR_BYTES, enough), True


def _reduced_bytes(job: Job, clip: Clip) -> int:
    """Of the gradients that travel together, which cannot be more than there are."""
    horovod = job.comm.horovod.fusion_mb if job.comm.horovod.fusion_mb is not None else _HOROVOD_FUSION_MB
    together = horovod if job.comm.backend == "horovod" else job.comm.torch.bucket_mb
    return int(min(together * 2**20, _parameter_bytes(clip)))


def _gathered_bytes(cut: Plan, clip: Clip) -> int:
    """Of one rank's image features, float32."""
    tokens = clip.tokenizer(["a"]).to(next(clip.model.parameters()).device)
    with torch.no_grad():
        width = clip.model.encode_text(tokens).shape[-1]  # type: ignore[operator]
    return int(cut.batch_size_per_rank * width * 4)


def _parameter_bytes(clip: Clip) -> int:
    return sum(parameter.numel() * 4 for parameter in clip.model.parameters())


def _gpu(device: torch.device) -> Gpu | None:
    return place.gpu(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
