"""Checks the stages that follow a job's own training, and lists each one's own keys. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.comm.backends import check_backend
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, plan, schedule
from trainer.config.stages import NAME, stage_title, stages_of
from trainer.config.tables import flat
from trainer.data.check import check_data
from trainer.errors import InputError, problems_of
from trainer.estimate.fit import check_micro_batch, with_gpu_limit
from trainer.model.catalog import check_teacher
from trainer.model.image_tokens import check_image_tokens
from trainer.model.packages import check_loss, check_teacher_tokens, check_text_mask


@dataclass(frozen=True)
class LaterStage:
    """Stage of a run behind the job's own training, with what is planned for it."""

    title: str
    keys: Mapping[str, Any]
    """Keys that it has for itself, such as model.image_size."""
    job: Job
    planned: Job
    """The job with a number in place of "auto"."""
    batch_plan: BatchPlan
    samples: int | None
    """Samples of an epoch; None if they are not known yet."""


def later_stages(job: Job, world_size: int, samples: int | None) -> list[LaterStage]:
    """Returns the later stages of a job that has passed its checks, whose epoch has so many samples."""
    found = []
    for table, (title, own) in zip(job.stage, _later(job), strict=True):
        planned = with_gpu_limit(own, world_size)
        keys = dict(flat({name: value for name, value in table.items() if name != NAME}))
        known = samples if own.data == job.data else None
        found.append(LaterStage(title, keys, own, planned, plan(planned, world_size), known))
    return found


def _later(job: Job) -> list[tuple[str, Job]]:
    """Returns title and job of each stage but the first."""
    return [(stage_title(job, number), own) for number, own in enumerate(stages_of(job)[1:], 2)]


def check_stages(job: Job, world_size: int, *, files: bool) -> None:
    """Raises InputError that lists the problems of the later stages; `files` lets their data be opened."""
    problems = [
        f"{title}: {line}"
        for title, own in _later(job)
        for text in problems_of(_checks(job, own, world_size, files=files))
        for line in text.splitlines()
    ]
    if problems:
        raise InputError("\n".join(problems))


def _checks(first: Job, own: Job, world_size: int, *, files: bool) -> list[Callable[[], object]]:
    """Returns the checks of what a stage may have for itself."""
    checks: list[Callable[[], object]] = [
        lambda: plan(own, world_size),
        lambda: check_micro_batch(own, world_size),
        lambda: check_backend(own, world_size),
        lambda: check_image_tokens(own.model),
        lambda: check_loss(own),
    ]
    if files:
        checks += [
            lambda: check_teacher(own.model),
            lambda: check_teacher_tokens(own.model),
            lambda: check_text_mask(own),
            lambda: check_stored(own),
        ]
    if files and own.data != first.data:
        checks.append(lambda: _check_length(own))
    return checks


def check_stored(job: Job) -> None:
    """Raises InputError if what teachers have stored is not that of the training data."""
    if job.model.targets:
        from trainer.data.targets import check_targets  # with numpy, which other jobs need not have here

        check_targets(job)


def _check_length(job: Job) -> None:
    if (samples := check_data(job.data)) is not None:
        schedule(job, samples)
