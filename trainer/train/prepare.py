"""Prepares a stage of a run: builds what its loop needs, equal on all ranks, and finds where it goes on."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from trainer.checkpoint.identity import RunIdentity, digest_of, digests
from trainer.checkpoint.memory_keeper import MemoryKeeper
from trainer.checkpoint.resume import begin_anew, expects_state, restore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm.backends import (
    asks_for_memory,
    disk_only,
    keeps_in_memory,
    row_of,
)
from trainer.comm.device import smallest_gpu_bytes
from trainer.comm.protocol import Comm
from trainer.comm.rank_zero import of_rank_0
from trainer.comm.replicas import check_replicas
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, batch_text, plan
from trainer.config.results import EMA, MIX
from trainer.config.training import PREPROCESSING
from trainer.copies.copier import copier_of
from trainer.data.bad_samples import name_left_out
from trainer.data.distributed_index import data_rows
from trainer.data.lanes import lanes_of_run
from trainer.data.sample import Source
from trainer.data.streams import loader_processes
from trainer.estimate.fit import with_micro_batch
from trainer.evaluate.evaluation import Evaluation
from trainer.model.build import Clip, build_model, give_initial_weights
from trainer.model.compile import compile_blocks, keep_kernels
from trainer.model.mixture import Mixture, digest_of_begin
from trainer.model.preprocessing import preprocessing_of, said_beside
from trainer.model.teacher import build_teacher, whole_captions
from trainer.preflight.check import PreflightReport, check_again, has_passed, preflight
from trainer.run.checkpoints import WEIGHTS, goes_on_from
from trainer.run.layout import Run
from trainer.safe_io.atomic import write_json
from trainer.sysinfo.shortage import loader_bytes, shared_memory_for_loaders
from trainer.text.wording import many
from trainer.train.checkpoint_policy import Metrics
from trainer.train.keep_in_memory import check_memory, keeper_of
from trainer.train.opened import OpenRun
from trainer.train.requests import Requests
from trainer.train.setup import TrainSetup
from trainer.train.stages import RunStage
from trainer.train.step import TrainStep
from trainer.world.condemned import condemn
from trainer.world.launchers import SINGLE

log = logging.getLogger("clipship")


def prepared(opened: OpenRun) -> TrainSetup:
    """Collective: returns what the loop needs for the stage, with the state that it goes on from.

    Raises InputError on all ranks alike.
    """
    stage, comm, run = opened.stage, opened.comm, opened.run
    job, source, length = stage.job, stage.source, stage.schedule
    planned = job
    if job.optim.max_batch_size_per_gpu == "auto":
        planned = with_micro_batch(job, comm.world.size, smallest_gpu_bytes(comm))
    batch_plan = plan(planned, comm.world.size)
    _announce(planned, comm, run, batch_plan, stage)
    stage.evaluation.say_left_out()  # the rank's log file is open by now
    for stored in stage.targets.teachers if stage.targets else ():
        _say("targets", str(stored))
    if job.comm.deterministic:
        torch.use_deterministic_algorithms(True)
    splits = row_of(job).splits_model
    has_state = (
        opened.goes_on
        and not (splits or job.keeps_first_weights)
        and expects_state(job, comm, run.checkpoints)
    )
    comm.heartbeat.begin_stage("building model")
    built = _as_before(job, opened) if opened.goes_on else stage.beginning_with(run.checkpoints)
    clip = build_model(built, batch_plan, comm, initial_weights=not has_state, on_host=splits)
    begin = digest_of_begin(job, clip.model)
    if (teacher := build_teacher(job, batch_plan, comm, clip)) is not None:
        clip = whole_captions(clip)
        _say("teacher", f"{job.model.teacher} with {job.model.teacher_pretrained}")
    _check_shared_memory(job, batch_plan, clip, source, comm)
    comm.heartbeat.begin_stage("preflight")
    if job.health.preflight and opened.goes_on:
        _preflight(job, comm, batch_plan, clip, run)
    comm.heartbeat.begin_stage("restoring state")
    for note in clip.notes:
        _say("model", note)
    _say("kernels", str(clip.kernels))
    if job.model.compile:
        kept = keep_kernels(os.environ)
        _say("compile", f"{compile_blocks(clip.model)}{kept and f'; kernels are kept in {kept}'}")
    step = TrainStep(job, batch_plan, comm, clip.model, teacher)
    mixture = Mixture(step.first, job.eval.mix)
    comm.heartbeat.reach("prepared")
    if asks_for_memory(job) and not keeps_in_memory(job):
        _say("in memory", disk_only(job))
    identity = _identity(stage, comm, clip, begin)
    if opened.goes_on:
        start = restore(job, comm, run.checkpoints, step, identity, opened.memory)
    else:
        start = begin_anew(comm, step, length.begin)
    if has_state and start.is_beginning:  # what was there is damaged
        give_initial_weights(job, clip.model)
    if comm.world.rank == 0:
        run.result.unlink(missing_ok=True)  # the run was done; now it goes back to a checkpoint, or further
    order = lanes_of_run(job, comm, source, start.order)
    if not job.data.streams:  # they have an order of their own
        _say("order", str(order))
    identity = replace(identity, order=asdict(order))
    check_replicas(comm, step.shards, step.optimizer)
    generation = f"generation {comm.world.generation}: " if comm.world.generation > 1 else ""
    _say("start", f"{generation}{start}")
    if opened.goes_on:  # else it copies what the stage before has left it, too
        identities = _identities(opened, identity)
        opened.copier = copier_of(opened.job, comm, run, identities, begins=start.steps_done == 0)
    writer = CheckpointWriter(
        run.checkpoints,
        job.checkpoint,
        comm.world.rank,
        comm.world.size,
        job.timeouts.backstop_s,
        clip.files,
        opened.copier,
    )
    keeper = keeper_of(opened.memory, start, step, comm, job.recovery.keep_every_steps, identity.facts())
    return TrainSetup(
        job=job,
        comm=comm,
        run=run,
        plan=batch_plan,
        schedule=length,
        clip=clip,
        train_step=step,
        source=source,
        targets=stage.targets,
        weights=stage.weights,
        order=order,
        evaluate=partial(_evaluate, stage.evaluation, clip, step, mixture, opened.requests, keeper),
        writer=writer,
        requests=opened.requests,
        identity=identity,
        start=start,
        started=opened.started,
        copier=opened.copier,
        keeper=keeper,
        left_out=opened.left_out,
    )


def _as_before(job: Job, opened: OpenRun) -> Job:
    """Collective: returns the job with the images' preprocessing that the run had before this start.

    The files that it began with may say another one by now, or be gone.
    """

    def found() -> dict[str, Any]:
        folder = goes_on_from(job.checkpoint.resume, opened.run.checkpoints)
        return said_beside(folder / WEIGHTS, job.model) if folder else {}

    said = {PREPROCESSING[key]: value for key, value in of_rank_0(opened.comm, found).items()}
    return job.model_copy(update={"model": job.model.model_copy(update=said)})


def _identity(stage: RunStage, comm: Comm, clip: Clip, begin: Mapping[str, str]) -> RunIdentity:
    """Collective: returns what the run is in this stage, as rank 0 finds it."""
    job = stage.job
    rows = data_rows(job.data, stage.source, stage.targets) if comm.world.rank == 0 else []
    data_files = comm.broadcast_object(digest_of(rows) if rows else "")
    eval_files = {key: digest_of(lines) for key, lines in stage.evaluation.contents().items()}
    anchor = begin if job.optim.anchor else {}
    return RunIdentity(
        job,
        stage.samples,
        digests(clip.files),
        data_files,
        {**eval_files, **begin},
        anchor,
        begin=stage.schedule.begin,
        preprocessing=preprocessing_of(clip.model),
    )


def _identities(opened: OpenRun, identity: RunIdentity) -> list[RunIdentity]:
    """Returns what the run is in each stage; of others than this one, what is known without their model."""
    return [
        identity if each is opened.stage else RunIdentity(each.job, each.samples, begin=each.schedule.begin)
        for each in opened.stages
    ]


def _evaluate(
    evaluation: Evaluation,
    clip: Clip,
    step: TrainStep,
    mixture: Mixture,
    requests: Requests,
    keeper: MemoryKeeper | None,
) -> Metrics:
    """Collective: evaluates the model, of which every rank then has all, and other weights in its place."""

    def asked_to_stop() -> bool:
        return requests.stop

    with step.shards.gathered():
        metrics = evaluation(clip, asked_to_stop)
    if keeper is not None:
        keeper.before_change()
    for begin, weights in ((EMA, step.ema), (MIX, mixture)):
        with weights.in_place() as is_there, step.shards.gathered():
            metrics |= evaluation(clip, asked_to_stop, begin) if is_there else {}
    return metrics


def _check_shared_memory(job: Job, batch_plan: BatchPlan, clip: Clip, source: Source, comm: Comm) -> None:
    """Collective: checks that each node's shared memory is large enough for loaders and steps in memory.

    Raises MachineError on the ranks of a node where it is too small.
    """
    node, nodes = comm.world.node, comm.all_gather_object(comm.world.node)
    workers = loader_processes(source, job.data.workers)
    loaders = nodes.count(node), workers, batch_plan.micro_batch_size * clip.images.sample_bytes
    shared_memory_for_loaders(node, *loaders)
    if keeps_in_memory(job):
        check_memory(node, clip.model, loader_bytes(*loaders))


def _announce(job: Job, comm: Comm, run: Run, batch_plan: BatchPlan, stage: RunStage) -> None:
    """Logs what will run, and the reason for each choice that the job left open."""
    world, source, samples, length = comm.world, stage.source, stage.samples, stage.schedule
    remainder = samples - length.epoch_steps * batch_plan.global_batch_size
    tail = f" ({many(remainder, 'sample')} of each epoch left out)" if remainder else ""
    if stage.title:
        _say("stage", f"{stage.title}: steps {length.begin + 1:,} to {length.steps:,} of {length.last:,}")
    _say("run folder", str(run.folder))
    here = f", {world.local_size} of them" if world.local_size < world.size else ""
    how = "as a single process" if world.launcher == SINGLE else f"by {world.launcher}"
    _say("world", f"{many(world.size, 'rank')}{here} on {world.node}, started {how}")
    _say(
        "backend",
        f"{comm.name} on {comm.device} "
        f"({', '.join(f'{name} {value}' for name, value in comm.versions().items())})",
    )
    _say("model", f"{job.model.name}, {job.model.precision}, {job.optim.loss_text}")
    _say("batch", batch_text(job, batch_plan))
    _say(
        "data",
        f"{many(samples, 'sample')} = {many(length.epoch_steps, 'step')} per epoch{tail}; "
        f"training {many(length.own_steps, 'step')}",
    )
    for cause, count in source.left_out.every.items():
        _say("", f"{many(count, 'sample')} not used: {cause}")
    if world.rank == 0:
        name_left_out(source.left_out)


def _preflight(job: Job, comm: Comm, batch_plan: BatchPlan, clip: Clip, run: Run) -> None:
    """Collective: measures the machines, or looks once more if they have passed in this start."""
    if has_passed(comm, run.preflight):
        _say("preflight", check_again(comm))
    else:
        _report_findings(preflight(job, comm, batch_plan, clip, run.folder), run, comm)


def _report_findings(report: PreflightReport, run: Run, comm: Comm) -> None:
    """Logs the findings and writes the measurements to the run folder.

    Raises MachineError, on all ranks alike, if the run cannot begin.
    """
    if comm.world.rank == 0:
        write_json(run.preflight, json.loads(report.as_json()))
    for finding in report.findings:
        _say(finding.severity, f"{finding.check}: {finding.text}")
        if finding.node and comm.world.rank == 0:
            condemn(finding.node, f"preflight: {finding.text.partition('; ')[0]}", os.environ)
    _say("preflight", f"{report.headline()}; figures in {run.preflight}")
    report.raise_errors()


def _say(what: str, text: str) -> None:
    log.info("%-12s %s", what, text)
