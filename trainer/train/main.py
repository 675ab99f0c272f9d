"""Runs one rank: `python -m trainer.train JOB`, however it was started.

It reads from top to bottom: find this rank's place, meet the others, open the run folder, build, train,
evaluate, write the result. It never imports `trainer.launch`.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch

from trainer.checkpoint.files import saved_ago_s
from trainer.checkpoint.identity import RunIdentity, digest_of, digests
from trainer.checkpoint.memory_keeper import MemoryKeeper
from trainer.checkpoint.memory_restore import node_memory
from trainer.checkpoint.resume import best_value, expects_state, restore
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm.backends import (
    asks_for_memory,
    check_backend,
    check_restarts,
    disk_only,
    keeps_in_memory,
    launcher_of,
    row_of,
)
from trainer.comm.connect import connect
from trainer.comm.cpu_binding import bind_cpus
from trainer.comm.gpu_memory import smallest_gpu_bytes
from trainer.comm.protocol import Comm
from trainer.comm.replicas import check_replicas
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, Schedule, batch_text, plan, schedule
from trainer.config.results import EMA, MIX
from trainer.copies.copier import copier_of
from trainer.data.bad_samples import name_left_out
from trainer.data.choose_order import order_of_run
from trainer.data.distributed_index import open_targets, open_together
from trainer.data.identity import data_rows
from trainer.data.order import epoch_samples
from trainer.data.processes import start_process_server
from trainer.data.sample import InUnits, Source
from trainer.data.sample_counts import shard_weights
from trainer.data.storage import use_storage
from trainer.data.streams import loader_processes
from trainer.data.targets import Targets
from trainer.estimate.fit import with_micro_batch
from trainer.evaluate.evaluation import Evaluation
from trainer.model.build import Clip, build_model, give_initial_weights
from trainer.model.compile import compile_blocks, keep_kernels
from trainer.model.host_compiler import check_compiler
from trainer.model.mixture import Mixture, digest_of_begin
from trainer.model.packages import check_loss, check_packages, check_teacher_tokens, check_text_mask
from trainer.model.teacher import build_teacher, whole_captions
from trainer.preflight.check import PreflightReport, preflight
from trainer.preflight.repeat import check_again, has_passed
from trainer.run.folder import done_text, run_folder
from trainer.run.job_limits import rank_job
from trainer.run.layout import Run
from trainer.run.notify import check_address
from trainer.safe_io.atomic import write_json
from trainer.sysinfo.shortage import loader_bytes, shared_memory_for_loaders
from trainer.telemetry.writers import check_installed
from trainer.text.wording import many
from trainer.train.checkpoint_policy import CheckpointPolicy, Metrics
from trainer.train.hang_limits import limit_learner
from trainer.train.keep_in_memory import check_memory, keeper_of
from trainer.train.loop import Loop
from trainer.train.monitors import open_monitors
from trainer.train.requests import Requests
from trainer.train.result import write_result
from trainer.train.run_folder import open_run
from trainer.train.same_environment import check_same
from trainer.train.setup import TrainSetup
from trainer.train.step import TrainStep
from trainer.world import lease
from trainer.world.condemned import condemn
from trainer.world.console import exit_now, run_rank
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import SINGLE, World
from trainer.world.variables import STARTS_AGAIN

log = logging.getLogger("clipship")


def main(job_path: Path, overrides: Sequence[str] = ()) -> int:
    """Runs this rank of the job; returns its exit code.

    A rank that fails leaves at once, so that the launcher ends the others.
    """
    return run_rank(sys.stdout, lambda world, heartbeat: _whole_run(job_path, overrides, world, heartbeat))


def _whole_run(job_path: Path, overrides: Sequence[str], world: World, heartbeat: Heartbeat) -> None:
    job = rank_job(job_path, overrides, world.node if world.local_size < world.size else "")
    heartbeat.limits = job.timeouts.by_phase
    heartbeat.learner = limit_learner(job, world, os.environ)
    check_restarts(job, launcher_of(os.environ), starts_again=STARTS_AGAIN in os.environ)
    use_storage(job)
    servers = [start_process_server()] if job.data.workers else []
    bind_cpus(job, world, os.environ, servers)
    lease.watch(heartbeat.lease)  # after the fork of the server, which has no threads
    comm = connect(job, world, os.environ, heartbeat)
    unequal = check_same(job, comm)
    setup = prepare(job, comm)
    if unequal:
        log.warning("%s\n(health.same_environment = warn)", unequal)
    if setup is not None:
        train(setup)
    heartbeat.begin_phase("shutdown")
    comm.barrier(job.timeouts.backstop_s)
    comm.close()


def prepare(job: Job, comm: Comm) -> TrainSetup | None:
    """Collective: opens the run folder and builds what the loop needs, equal on all ranks.

    Returns None if the run is done already. Raises InputError on all ranks alike.
    """
    started = time.monotonic()
    planned = job
    if job.optim.max_batch_size_per_gpu == "auto":
        planned = with_micro_batch(job, comm.world.size, smallest_gpu_bytes(comm))
    batch_plan = plan(planned, comm.world.size)
    check_backend(job, comm.world.size)
    check_installed(job.logging)
    check_address(job.logging.notify, os.environ)
    check_compiler(job.model)
    check_packages(job)
    check_loss(job)
    check_text_mask(job)
    check_teacher_tokens(job.model)
    comm.heartbeat.begin_stage("data index")
    source = open_together(job, comm)
    targets = open_targets(job, source, comm)
    evaluation = Evaluation(job, comm, run_folder(job))
    weights = shard_weights(job.data, source.units if isinstance(source, InUnits) else None)
    samples = epoch_samples(source.shard_sizes(), weights)
    length = schedule(job, samples)
    run = open_run(job, comm)
    asked_steps = length.steps if job.checkpoint.longer else 0
    if comm.broadcast_object(run.finished_as_asked(job.checkpoint.resume, asked_steps)):
        _say("result", done_text(run))
        return None
    _announce(planned, comm, run, batch_plan, source, samples, length)
    evaluation.say_left_out()  # the rank's log file is open by now
    for stored in targets.teachers if targets else ():
        _say("targets", str(stored))
    if job.comm.deterministic:
        torch.use_deterministic_algorithms(True)
    splits = row_of(job).splits_model
    has_state = not splits and not job.keeps_first_weights and expects_state(job, comm, run.checkpoints)
    comm.heartbeat.begin_stage("building model")
    clip = build_model(job, batch_plan, comm, initial_weights=not has_state, on_host=splits)
    begin = digest_of_begin(job, clip.model)
    if (teacher := build_teacher(job, batch_plan, comm, clip)) is not None:
        clip = whole_captions(clip)
        _say("teacher", f"{job.model.teacher} with {job.model.teacher_pretrained}")
    _check_shared_memory(job, batch_plan, clip, source, comm)
    comm.heartbeat.begin_stage("preflight")
    if job.health.preflight and has_passed(comm, run.preflight):
        _say("preflight", check_again(comm))
    elif job.health.preflight:
        _report_findings(preflight(job, comm, batch_plan, clip, run.folder), run, comm)
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
    memory = node_memory(job, comm, os.environ)
    identity = _identity(job, comm, clip, source, targets, samples, evaluation.contents(), begin)
    start = restore(job, comm, run.checkpoints, step, identity, memory)
    if has_state and start.is_beginning:  # what was there is damaged
        give_initial_weights(job, clip.model)
    if comm.world.rank == 0:
        run.result.unlink(missing_ok=True)  # the run was done; now it goes back to a checkpoint, or further
    order = order_of_run(job, comm, source, start.order)
    if not job.data.streams:  # they have an order of their own
        _say("order", str(order))
    identity = replace(identity, order=order.facts())
    check_replicas(comm, step.shards, step.optimizer)
    generation = f"generation {comm.world.generation}: " if comm.world.generation > 1 else ""
    _say("start", f"{generation}{start}")
    copier = copier_of(job, comm, run, identity, begins=start.steps_done == 0)
    writer = CheckpointWriter(
        run.checkpoints,
        job.checkpoint,
        comm.world.rank,
        comm.world.size,
        job.timeouts.backstop_s,
        clip.files,
        copier,
    )
    requests = Requests(run.folder, comm.world.rank, comm.heartbeat)
    keeper = keeper_of(memory, start, step, comm, job.recovery.keep_every_steps, identity.facts())
    return TrainSetup(
        job=job,
        comm=comm,
        run=run,
        plan=batch_plan,
        schedule=length,
        clip=clip,
        train_step=step,
        source=source,
        targets=targets,
        weights=weights,
        order=order,
        evaluate=partial(_evaluate, evaluation, clip, step, mixture, requests, keeper),
        writer=writer,
        requests=requests,
        identity=identity,
        start=start,
        started=started,
        copier=copier,
        keeper=keeper,
    )


def _identity(
    job: Job,
    comm: Comm,
    clip: Clip,
    source: Source,
    targets: Targets | None,
    samples: int,
    words: Mapping[str, Sequence[str]],
    begin: Mapping[str, str],
) -> RunIdentity:
    """Collective: returns what the run is, as rank 0 finds it."""
    rows = data_rows(job.data, source, targets) if comm.world.rank == 0 else []
    data_files = comm.broadcast_object(digest_of(rows) if rows else "")
    eval_files = {key: digest_of(lines) for key, lines in words.items()}
    anchor = begin if job.optim.anchor else {}
    return RunIdentity(job, samples, digests(clip.files), data_files, {**eval_files, **begin}, anchor)


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


def train(setup: TrainSetup) -> None:
    """Collective: runs the remaining steps and the evaluation; result.json then marks the run as done.

    Raises Preempted if a request to stop ended it early.
    """
    job, comm = setup.job, setup.comm
    best = best_value(job, comm, setup.run.checkpoints)
    ago_s = saved_ago_s(setup.run.checkpoints) if setup.start.memory else 0.0
    policy = CheckpointPolicy(
        job.checkpoint, job.eval, setup.schedule, setup.start.saved_step, best, saved_ago_s=ago_s
    )
    with open_monitors(setup) as monitors:
        result = Loop(setup, monitors, policy).run()
        result.raise_if_stopped()  # in the block, since metric writers record how the training ended
    write_result(setup, result)


def _announce(
    job: Job, comm: Comm, run: Run, batch_plan: BatchPlan, source: Source, samples: int, length: Schedule
) -> None:
    """Logs what will run, and the reason for each choice that the job left open."""
    world = comm.world
    remainder = samples - length.epoch_steps * batch_plan.global_batch_size
    tail = f" ({many(remainder, 'sample')} of each epoch left out)" if remainder else ""
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
        f"training {many(length.steps, 'step')}",
    )
    for cause, count in source.left_out.every.items():
        _say("", f"{many(count, 'sample')} not used: {cause}")
    if world.rank == 0:
        name_left_out(source.left_out)


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


@click.command(help="Run one rank of JOB, started by torchrun, srun, mpirun or horovodrun.")
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job file."
)
def command(job: Path, overrides: tuple[str, ...]) -> None:
    """Run one rank of JOB; its supervisor starts it."""
    exit_now(main(job, overrides))


if __name__ == "__main__":
    command()
