"""Checks the files, tables, model and run folder that a job names, before anything starts.

Imports no torch and no open_clip.
"""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from trainer.comm.backends import check_backend, check_lost_nodes, check_restarts, launcher_for
from trainer.config import Job
from trainer.config.batch_plan import plan, schedule
from trainer.config.formats import FORMATS
from trainer.config.stores import stores_of
from trainer.config.world_sizes import check_nodes
from trainer.copies.copied_run import CopiedRun
from trainer.copies.place import check_place
from trainer.data.check import check_data
from trainer.data.sample_counts import check_streams
from trainer.data.shard_names import expand_shards
from trainer.data.storage import check_storage, use_storage
from trainer.errors import InputError, problems_of
from trainer.estimate.fit import check_micro_batch
from trainer.evaluate.inputs import check_evaluation, check_retrieval
from trainer.evaluate.suite_folders import check_suite, check_suite_files
from trainer.launch.schedulers import scheduler
from trainer.model.catalog import check_init, check_model, check_pretrained, check_tag, check_teacher
from trainer.model.host_compiler import check_compiler
from trainer.model.image_tokens import check_image_tokens
from trainer.model.packages import check_loss, check_packages, check_teacher_tokens, check_text_mask
from trainer.plan.stages import check_stages, check_stored
from trainer.run.checkpoints import check_no_file, check_resume, newest_step
from trainer.run.folder import check_run_folder, run_folder
from trainer.run.layout import CHECKPOINTS
from trainer.run.notify import check_address
from trainer.telemetry.writers import check_installed


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
    _refuse(checks)
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


def check_submission(job: Job, to: str, *, data: bool) -> None:
    """Raises InputError with every reason why the job cannot run there. Makes nothing and asks no cluster.

    `data` is False if this machine does not see the data. A scheduler whose ranks see other files than this
    machine checks them when they start.
    """
    place = scheduler(to)
    checks: list[Callable[[], object]] = [lambda: place.validate(job)]
    if place.same_files:
        checks.insert(0, lambda: check_job(job, job.resources.world_size) if data else check_run_folder(job))
    if problems := dict.fromkeys(line for text in problems_of(checks) for line in text.splitlines()):
        raise InputError("\n".join(problems))


def check_evaluated(job: Job) -> None:
    """Raises InputError that lists every problem of a job that only evaluates a model."""
    _reach_storage(job)
    _refuse(
        (
            lambda: check_model(job.model.name),
            lambda: _check_packages(job),
            lambda: check_storage(job),
            lambda: check_evaluation(job.eval),
            lambda: check_retrieval(job),
            lambda: check_suite_files(job.eval),
        )
    )


def _refuse(checks: Sequence[Callable[[], object]]) -> None:
    """Raises InputError that lists the problems that the checks raise."""
    if problems := problems_of(checks):
        raise InputError("\n".join(problems))
