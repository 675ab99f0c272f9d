"""Checks the files, tables, model and run folder that a job names, before anything starts.

Imports no torch and no open_clip.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.comm.backends import check_backend, check_lost_nodes, check_restarts, launcher_for
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, plan, schedule
from trainer.config.formats import FORMATS
from trainer.config.loader import load_job
from trainer.config.stages import NAME, stage_title, stages_of
from trainer.config.stores import stores_of
from trainer.config.tables import flat
from trainer.config.world_sizes import check_nodes
from trainer.copies.copied_run import CopiedRun
from trainer.copies.place import check_place
from trainer.data.check import check_data
from trainer.data.sample_counts import check_streams
from trainer.data.shard_names import expand_shards
from trainer.data.storage import check_storage, use_storage
from trainer.errors import InputError, problems_of, raise_problems
from trainer.estimate.fit import check_micro_batch, with_gpu_limit
from trainer.evaluate.inputs import check_evaluation, check_retrieval
from trainer.evaluate.suite_data import check_suite, check_suite_files
from trainer.launch.hosts import Host
from trainer.launch.local import ranks_of
from trainer.launch.schedulers import scheduler
from trainer.model.catalog import check_init, check_model, check_pretrained, check_tag, check_teacher
from trainer.model.host_compiler import check_compiler
from trainer.model.image_tokens import check_image_tokens
from trainer.model.packages import check_loss, check_packages, check_teacher_tokens, check_text_mask
from trainer.plan.device import no_gpu_here
from trainer.preflight.host_probe import try_place
from trainer.run.checkpoints import check_no_file, check_resume, newest_step
from trainer.run.folder import check_run_folder, run_folder
from trainer.run.layout import CHECKPOINTS
from trainer.run.notify import check_address
from trainer.telemetry.writers import check_installed


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
    raise_problems(problems)


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


def check_job(job: Job, world_size: int, *, fresh: bool = False) -> int | None:
    """Returns the number of training samples; None if they cannot be counted before the start.

    With `fresh`, the run folder's content will be moved aside. Raises InputError that lists every problem.
    """
    elsewhere = _runs_elsewhere(job)
    _reach_storage(job)
    checks: tuple[Callable[[], object], ...] = (
        *_without_looking(job, world_size),
        lambda: check_model(job.model.name),
        lambda: check_loss(job),
        lambda: check_image_tokens(job.model),
        lambda: check_pretrained(job.model.pretrained),
        lambda: check_init(job.model),
        lambda: check_teacher(job.model),
        lambda: check_teacher_tokens(job.model),
        lambda: check_stored(job),
        lambda: check_tag(job.model.name, job.model.pretrained),
        lambda: check_text_mask(job),
        lambda: check_evaluation(job.eval),
        lambda: check_retrieval(job),
        lambda: check_suite(job.eval),
        lambda: None if elsewhere else check_installed(job.logging),
        lambda: None if elsewhere else check_address(job.logging.notify, os.environ),
        lambda: None if elsewhere else check_compiler(job.model),
        lambda: None if elsewhere else _check_packages(job),
        lambda: None if elsewhere else check_storage(job),
        lambda: check_resume(job.checkpoint.resume, None if fresh else run_folder(job) / CHECKPOINTS),
        lambda: check_no_file(job.checkpoint.resume) if job.stage else None,
        lambda: check_run_folder(job, fresh=fresh),
        lambda: None if elsewhere else _check_copies(job, fresh=fresh),
        lambda: check_stages(job, world_size, files=True),
    )
    samples, problems = None, []
    try:
        samples = check_data(job.data)
        if job.data.streams:
            check_streams(expand_shards(job.data.train), world_size)
        if samples is not None:
            schedule(job, samples)
    except InputError as problem:
        problems.append(str(problem))
    problems += problems_of(checks)
    raise_problems(problems)
    return samples


def check_without_files(job: Job, world_size: int) -> int | None:
    """Check a job without its files; returns the number of samples of synthetic data, else None.

    Raises InputError that lists every problem.
    """
    checks = _without_looking(job, world_size)
    if not os.path.isabs(job.model.name):
        checks += [lambda: check_model(job.model.name), lambda: check_loss(job)]
        checks.append(lambda: check_image_tokens(job.model))
        checks.append(lambda: check_tag(job.model.name, job.model.pretrained))
    if not _runs_elsewhere(job):
        checks += [lambda: _check_packages(job), lambda: check_storage(job)]
    checks.append(lambda: check_stages(job, world_size, files=False))
    raise_problems(problems_of(checks))
    return None if FORMATS[job.data.kind].unit else job.data.synthetic_samples


def _reach_storage(job: Job) -> None:
    """Lets this process ask object storage as [data.storage] says, if the job names any."""
    if stores_of(job.addresses):
        use_storage(job)


def _check_copies(job: Job, *, fresh: bool) -> None:
    """Raises InputError if checkpoints cannot be copied to where the job says, or replace others there."""
    if (to := CopiedRun.of(job)) is not None:
        check_storage(job)
        begins = fresh or not newest_step(run_folder(job) / CHECKPOINTS)
        check_place(job, to, (), begins=begins)


def _without_looking(job: Job, world_size: int) -> list[Callable[[], object]]:
    """Returns the checks of a job that look at nothing else."""
    return [
        lambda: plan(job, world_size),
        lambda: check_micro_batch(job, world_size),
        lambda: check_backend(job, world_size),
        lambda: _check_recovery(job),
        lambda: check_nodes(job),
    ]


def _runs_elsewhere(job: Job) -> bool:
    """Returns whether the ranks use another Python than this one: an image's, or that of a cluster's nodes.

    The nodes' Python is known to be another one if this one, of a login node, has no torch.
    """
    return job.in_image or (bool(job.schedulers) and not _has_torch())


def _has_torch() -> bool:
    return find_spec("torch") is not None


def _check_packages(job: Job) -> None:
    """Checks the packages of the model if this Python can run ranks; one without torch only writes jobs."""
    if _has_torch():
        check_packages(job)


def _check_recovery(job: Job) -> None:
    """Raises InputError if the job asks for restarts that its ranks on this host could not make."""
    if job.recovery.max_restarts:
        launcher = launcher_for(job, several_hosts=job.resources.nodes > 1)
        check_restarts(job, launcher)
        if not job.schedulers:
            check_lost_nodes(job, launcher, keeps_going=launcher == "clipship")


def check_submission(job: Job, to: str, *, data: bool) -> int | None:
    """Returns the number of training samples, None if this machine cannot count them.

    Makes nothing and asks no cluster. `data` is False if this machine does not see the data. A scheduler
    whose ranks see other files than this machine checks them when they start. Raises InputError with every
    reason why the job cannot run there.
    """
    place = scheduler(to)
    samples, problems = None, []
    try:
        if place.same_files and data:
            samples = check_job(job, job.resources.world_size)
        elif place.same_files:
            check_run_folder(job)
    except InputError as problem:
        problems.append(str(problem))
    problems += problems_of([lambda: place.validate(job)])
    raise_problems(problems)
    return samples


def check_evaluated(job: Job) -> None:
    """Raises InputError that lists every problem of a job that only evaluates a model."""
    _reach_storage(job)
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_model(job.model.name),
        lambda: _check_packages(job),
        lambda: check_storage(job),
        lambda: check_evaluation(job.eval),
        lambda: check_retrieval(job),
        lambda: check_suite_files(job.eval),
    )
    raise_problems(problems_of(checks))


_ELSEWHERE = (
    "if only the cluster's nodes see the files of the job, use `clipship check --no-data`; for that, "
    "`clipship submit`, `sweep` and `resume` have --no-check"
)


def checked(
    job_path: Path,
    overrides: Sequence[str],
    ranks: int | None,
    *,
    hosts: Sequence[Host] | None = None,
    image: bool = False,
    files: bool = True,
    fresh: bool = False,
) -> tuple[Job, int, int | None]:
    """Returns the job, its world size and the number of samples, None if not known.

    `hosts` are those of --hosts, in place of `ranks`; `image` checks its image, batch script and MPIJob too;
    `files` opens the files that it names; `fresh` means that its run folder will be a new one. Raises
    InputError that lists every problem.
    """
    job = load_job(job_path, overrides)
    world_size = ranks_of(job, ranks, hosts)
    samples, problems = None, []
    try:
        samples = check_job(job, world_size, fresh=fresh) if files else check_without_files(job, world_size)
    except InputError as problem:
        problems.append(str(problem))
        if image and files and job.schedulers:
            problems.append(_ELSEWHERE)
    # `clipship check` without --nproc is about the cluster, if the job has one
    if files and (not image or ranks is not None or not (job.resources.nodes > 1 or job.schedulers)):
        problems += problems_of([lambda: try_place(job, run_folder(job))])
    if image and ranks is not None:
        problems += no_gpu_here(job, local=True)  # without --nproc another machine may be meant
    if image:
        problems += problems_of(
            partial(job_check, job) for job_check in _submission_checks(job, ranks, files=files)
        )
    raise_problems(problems)
    return job, world_size, samples


def _submission_checks(job: Job, ranks: int | None, *, files: bool) -> Iterator[Callable[[Job], object]]:
    """Yields the checks of the job's image and of its schedulers; each of them raises InputError."""
    if job.model_fields_set & {"image", "stack"}:
        from trainer.image.compatibility import check_stack

        yield check_stack
    # an image with a digest is built already
    if files and job.image.tag is not None and "@" not in job.image.tag:
        from trainer.image.context import check_files

        yield lambda job: check_files(job.image.site)
    for name in job.schedulers if ranks is None else ():
        yield scheduler(name).validate
