"""Checks of what a job names - files, tables, model, run folder - before anything starts. Imports no torch and no open_clip."""

import os
from collections.abc import Callable, Iterable, Sequence

from trainer.errors import InputError
from trainer.inputs.checkpoints import check_resume
from trainer.inputs.compiler import check_compiler
from trainer.inputs.evaluation import check_evaluation, check_retrieval, class_names, lines, templates
from trainer.inputs.models import check_model, check_pretrained, check_tag, check_trained, known_models
from trainer.inputs.run_folder import check_run_folder, run_folder
from trainer.inputs.samples import check_data, check_streams, recorded_sizes
from trainer.inputs.shards import expand_seekable, expand_shards
from trainer.job import Job
from trainer.plan import plan, schedule
from trainer.sinks import check_installed

__all__ = [
    "check",
    "check_data",
    "check_evaluated",
    "check_evaluation",
    "check_model",
    "check_retrieval",
    "check_run_folder",
    "check_without_files",
    "class_names",
    "expand_seekable",
    "expand_shards",
    "known_models",
    "lines",
    "problems_of",
    "recorded_sizes",
    "run_folder",
    "templates",
]


def check(job: Job, world_size: int, *, fresh: bool = False) -> int | None:
    """The number of training samples, None where nothing counts them before the start. Raises InputError listing every problem.

    `fresh`: what the run folder holds will be set aside.
    """
    checks: tuple[Callable[[], object], ...] = (
        lambda: plan(job, world_size),
        lambda: check_model(job.model.name),
        lambda: check_trained(job.model.name),
        lambda: check_pretrained(job.model.pretrained),
        lambda: check_tag(job.model.name, job.model.pretrained),
        lambda: check_evaluation(job.eval),
        lambda: check_retrieval(job),
        lambda: None if job.in_image else check_installed(job.logging),
        lambda: None if job.in_image else check_compiler(job.model),
        lambda: check_resume(job.checkpoint.resume, None if fresh else run_folder(job) / "checkpoints"),
        lambda: check_run_folder(job, fresh=fresh),
    )
    samples = None
    problems: list[str] = []
    try:
        samples = check_data(job.data)
        if job.data.streams:
            check_streams(expand_shards(job.data.train), world_size)
        if samples is not None:
            schedule(job, samples)
    except InputError as problem:
        problems.append(str(problem))
    problems += problems_of(checks)
    if problems:
        raise InputError("\n".join(problems))
    return samples


def check_without_files(job: Job, world_size: int) -> int | None:
    """What `check` finds without looking at the files that a job names; the samples of made-up data. Raises InputError listing it."""
    checks: list[Callable[[], object]] = [lambda: plan(job, world_size)]
    if not os.path.isabs(job.model.name):
        checks += [lambda: check_model(job.model.name), lambda: check_trained(job.model.name)]
        checks.append(lambda: check_tag(job.model.name, job.model.pretrained))
    _refuse(checks)
    return job.data.synthetic_samples if job.data.kind == "synthetic" else None


def check_evaluated(job: Job) -> None:
    """Raises InputError listing every problem of a job that only evaluates a model."""
    _refuse(
        (
            lambda: check_model(job.model.name),
            lambda: check_evaluation(job.eval),
            lambda: check_retrieval(job),
        )
    )


def _refuse(checks: Sequence[Callable[[], object]]) -> None:
    """Raises InputError listing the problems that the checks raise."""
    if problems := problems_of(checks):
        raise InputError("\n".join(problems))


def problems_of(checks: Iterable[Callable[[], object]]) -> list[str]:
    """What each check that raises InputError says, in their order."""
    found: list[str] = []
    for look in checks:
        try:
            look()
        except InputError as problem:
            found.append(str(problem))
    return found
