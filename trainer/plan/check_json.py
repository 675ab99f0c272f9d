"""Fields of `clipship check --json` about a job that can run. Imports no torch."""

from typing import Any

from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.estimate.architecture import planned_architecture
from trainer.estimate.fit import memory_of, with_gpu_limit
from trainer.estimate.size import checkpoint_bytes
from trainer.estimate.step_speed import step_speed
from trainer.plan.check import LaterStage
from trainer.plan.describe import Facts, all_warnings, rows_of, total_steps
from trainer.plan.device import on_gpus, scaling_of
from trainer.plan.unused_keys import unused_keys
from trainer.run.folder import run_folder


def check_fields(
    job: Job, world_size: int, samples: int | None, *, local: bool, files: bool = True
) -> dict[str, Any]:
    """Returns what `describe` says, as numbers where it has numbers. What is not known is None.

    The arguments are those of `trainer.plan.describe.describe`.
    """
    facts = Facts.of(job, world_size, samples, local=local, files=files)
    batch_plan, disk, save = facts.batch_plan, facts.disk, facts.save
    steps = total_steps(job, samples)
    stages = [_of_stage(stage, world_size, local=local) for stage in facts.later]
    size = checkpoint_bytes(job)
    return {
        "name": job.name,
        "run_folder": str(run_folder(job)),
        "ranks": world_size,
        "samples": samples,
        "steps": steps,
        "global_batch_size": batch_plan.global_batch_size,
        "batch_size_per_rank": batch_plan.batch_size_per_rank,
        "micro_batch_size": batch_plan.micro_batch_size,
        "accumulation": batch_plan.accumulation,
        "checkpoint_bytes": None if size is None else size.total,
        "disk_free_bytes": None if disk is None else disk.free,
        "save_s": None if save is None else save.seconds,
        **_of_gpu(job, world_size, steps, local=local),
        **({"stages": stages} if stages else {}),
        "warnings": list(all_warnings(facts)),
        "no_effect": {key: why for keys, why in unused_keys(job) for key in keys},
        "rows": _joined(rows_of(facts)),
    }


def _of_stage(stage: LaterStage, world_size: int, *, local: bool) -> dict[str, float | str | None]:
    """Returns the fields about a later stage."""
    steps = total_steps(stage.job, stage.samples)
    about = {"stage": stage.title, "steps": steps, "global_batch_size": stage.batch_plan.global_batch_size}
    return {**about, **_of_gpu(stage.job, world_size, steps, local=local)}


def _of_gpu(job: Job, world_size: int, steps: int | None, *, local: bool) -> dict[str, float | None]:
    """Returns estimates: bytes of a GPU's memory, samples a second of all GPUs, hours of the run.

    On a cluster also the seconds of a step with what its GPUs wait for each other, and the share of a GPU's
    speed alone that this leaves.
    """
    names = ("gpu_bytes", "samples_per_s", "hours", "step_s", "efficiency")
    fields: dict[str, float | None] = dict.fromkeys(names)
    shape, gpu = planned_architecture(job.model), job.resources.known_gpu
    if shape is None or not on_gpus(job, local=local):
        return fields
    batch_plan = plan(with_gpu_limit(job, world_size), world_size)
    fields["gpu_bytes"] = memory_of(shape, job, batch_plan).total
    if gpu is not None:
        speed = step_speed(shape, job, batch_plan, gpu)
        fields["samples_per_s"] = speed.samples_s * world_size
        if steps is not None:
            fields["hours"] = speed.hours(steps * batch_plan.global_batch_size, world_size)
    if not local and (scaling := scaling_of(job, batch_plan)) is not None:
        fields["step_s"], fields["efficiency"] = scaling.step_s, scaling.efficiency
    return fields


def _joined(rows: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns the texts by topic; a row without a topic continues the one above."""
    joined: dict[str, list[str]] = {}
    topic = ""
    for name, text in rows:
        topic = name or topic
        joined.setdefault(topic, []).append(text)
    return joined
