"""Finds where a start begins: at step 0, or at a checkpoint, which rank 0 checks and sends to the others.

Rank 0 alone reads, so the number of ranks may differ from that which wrote the checkpoint. Ranks that are
started again go on from a step that a node has in memory, if there is one (`memory_restore.py`).
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import files, foreign, state
from trainer.checkpoint.files import BrokenCheckpoint
from trainer.checkpoint.identity import RunIdentity, check_facts
from trainer.checkpoint.memory_restore import FromMemory, NodeMemory, choose, restore_from_memory
from trainer.checkpoint.state import TrainState, WholeState
from trainer.comm.backends import keeps_in_memory
from trainer.comm.protocol import Comm
from trainer.comm.rank_zero import of_rank_0
from trainer.comm.replicas import broadcast_replicas
from trainer.config import Job
from trainer.config.batch_plan import schedule
from trainer.config.resume_rule import may_change_keys
from trainer.errors import InputError
from trainer.run.checkpoints import newest_step, saved_step
from trainer.run.folder import not_written
from trainer.run.layout import ARTEFACTS, BEGUN_BY_FILE, METRICS_FILE
from trainer.safe_io.atomic import write_whole
from trainer.safe_io.values import read_values, value_lines
from trainer.text.masking import masked
from trainer.text.wording import many

log = logging.getLogger("clipship")


@dataclass(frozen=True)
class StartPoint:
    """Number of steps that are done already, and the checkpoint or the memory that they come from."""

    steps_done: int
    source: Path | None
    memory: FromMemory | None = None
    order: Mapping[str, int] | None = None
    """The fields of the lanes of the run that goes on; None if they may be chosen."""
    is_own: bool = True
    """False if the source is no checkpoint of this run's folder, which then still needs one of that step."""
    bad_samples: Mapping[str, int] = field(default_factory=dict)
    """Number of samples that the run has skipped until that step, by cause."""

    @property
    def is_beginning(self) -> bool:
        """True if no state was loaded: the run begins with the model's initial weights."""
        return self.source is None and self.memory is None

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint in the run's folder; 0 if the source lies elsewhere."""
        done = self.steps_done if self.memory is None else self.memory.saved_step
        return done if self.is_own else 0

    def __str__(self) -> str:
        if self.memory is not None:
            return f"step {self.steps_done}, from the memory of {self.memory.node}"
        first = "the weights of the stage before" if self.steps_done else "the beginning"
        return f"step {self.steps_done}, from {self.source or first}"


def expects_state(job: Job, comm: Comm, checkpoints: Path) -> bool:
    """Collective: returns whether the weights will come from a checkpoint or from a node's memory.

    It looks at no contents: if they turn out to be damaged, `restore` may still begin at step 0.
    """
    if comm.world.generation > 1 and keeps_in_memory(job):
        return True

    def found() -> bool:
        wanted = _wanted(job, comm, checkpoints)
        return wanted != "never" and (wanted != "auto" or newest_step(checkpoints) > 0)

    return bool(comm.broadcast_object(comm.world.rank == 0 and found()))


def _wanted(job: Job, comm: Comm, checkpoints: Path) -> str:
    """Returns from where to go on, for rank 0.

    "never" is meant for the first start of a submission: its later ones, and restarts within a start, go on.
    """
    wanted = job.checkpoint.resume
    if wanted != "never" or comm.world.generation > 1:
        return "auto" if wanted == "never" else wanted
    own = comm.world.submission
    return "auto" if own and own == read_values(_begun_by(checkpoints)).get("id") else wanted


def _begun_by(checkpoints: Path) -> Path:
    return checkpoints.parent / ARTEFACTS / BEGUN_BY_FILE


def _note_begin(checkpoints: Path, submission: str) -> None:
    """Writes down which submission begins the run anew. Raises InputError if that cannot be written."""
    path = _begun_by(checkpoints)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, value_lines({"id": submission}))
    except OSError as problem:
        raise InputError(not_written(checkpoints.parent, problem)) from None


def restore(
    job: Job,
    comm: Comm,
    checkpoints: Path,
    train: TrainState,
    run: RunIdentity,
    memory: NodeMemory | None = None,
) -> StartPoint:
    """Collective: restores weights, optimizer and scaler on every rank.

    The newest step in `memory` counts, if any node has one; else the job's `checkpoint.resume` says from
    where. `run` is what the state must belong to. Raises InputError on every rank.
    """
    if memory is not None and (start := _from_memory(comm, checkpoints, train, memory, run)) is not None:
        return start
    had_any = memory is not None and any(comm.all_gather_object(memory.had_any or bool(memory.kept)))
    whole: WholeState | None = None

    def begin() -> tuple[int, str | None, Mapping[str, Any], dict[str, Any]]:
        nonlocal whole
        wanted = _wanted(job, comm, checkpoints)
        try:
            start, whole = _restore_here(job, wanted, checkpoints, train, run)
        except BrokenCheckpoint as error:
            raise InputError(str(error)) from None
        if wanted == "never" and comm.world.submission:
            _note_begin(checkpoints, comm.world.submission)
        if start.is_beginning:
            _refuse_to_forget(checkpoints, had_any, wanted)
        _set_aside(checkpoints, start.steps_done)
        source, scaler = str(start.source) if start.source else None, whole.scaler if whole else {}
        others = {"order": start.order, "is_own": start.is_own, "bad_samples": start.bad_samples}
        return start.steps_done, source, scaler, others

    steps_done, source, scaler, others = of_rank_0(comm, begin)
    if not train.shards.split:
        broadcast_replicas(comm, train.model, train.optimizer)
    elif source is not None:
        scatter(comm, train, whole)
    if scaler and train.scaler.is_enabled():
        train.scaler.load_state_dict(dict(scaler))
    return StartPoint(steps_done, Path(source) if source else None, **others)


def _from_memory(
    comm: Comm, checkpoints: Path, train: TrainState, memory: NodeMemory, run: RunIdentity
) -> StartPoint | None:
    """Collective: restores the newest step that a node has in memory; None if the disk has to serve."""
    on_disk = comm.broadcast_object(newest_step(checkpoints) if comm.world.rank == 0 else 0)
    found = restore_from_memory(comm, memory, train, on_disk, run)
    if found is None:
        return None
    if comm.world.rank == 0:
        files.remove_leftovers(checkpoints)
    of_rank_0(comm, lambda: _set_aside(checkpoints, found.step))
    return StartPoint(found.step, None, found, found.order, bad_samples=found.bad_samples)


def _set_aside(checkpoints: Path, step: int) -> None:
    """Moves checkpoints of later steps aside and says so. Raises InputError if one cannot be moved."""
    try:
        for aside in files.set_aside(checkpoints, step):
            log.warning(
                "resume       moved aside, because this start continues from an earlier step: %s", aside
            )
    except OSError as error:
        raise InputError(
            f"{checkpoints}: this start continues from step {step}, and what is there of later steps cannot "
            f"be moved aside: {error}. Make it possible to rename it, or move it elsewhere."
        ) from None


def begin_anew(comm: Comm, train: TrainState, step: int) -> StartPoint:
    """Collective: makes the ranks equal, whose model has its stage's first weights, after `step` steps."""
    if not train.shards.split:
        broadcast_replicas(comm, train.model, train.optimizer)
    return StartPoint(step, None)


def step_to_go_on(job: Job, comm: Comm, checkpoints: Path, memory: NodeMemory | None) -> int:
    """Collective: returns the step from which `restore` would go on, for who must know it before.

    Raises InputError on every rank.
    """
    kept = memory.kept if memory is not None else ()
    offers = comm.all_gather_object([(each.step, each.digest) for each in kept])

    def found() -> int:
        wanted = _wanted(job, comm, checkpoints)
        in_memory = choose(offers, newest_step(checkpoints)).step
        if in_memory or wanted == "never":
            return in_memory
        folder, manifest = _written_since(wanted, checkpoints)
        if folder is None:
            _, manifest = _chosen(wanted, checkpoints)
        return int(manifest.get("step", 0))

    return int(of_rank_0(comm, found))


def best_value(job: Job, comm: Comm, checkpoints: Path) -> float:
    """Collective: returns the best value of the metric `checkpoint.best` so far, the same on every rank.

    -inf if no checkpoint on disk has one; an earlier start may have kept the best of another metric.
    """
    metric = job.checkpoint.best
    if metric is None:
        return -math.inf
    best = files.best_so_far(checkpoints) if comm.world.rank == 0 else None
    value = best["value"] if best is not None and best["metric"] == metric else -math.inf
    return float(comm.broadcast_object(value))


def _restore_here(
    job: Job, wanted: str, checkpoints: Path, train: TrainState, run: RunIdentity
) -> tuple[StartPoint, WholeState | None]:
    """Returns where to begin and what was read; model and optimizer have it, too, unless they are split."""
    start, whole = _read_here(job, wanted, checkpoints, train, run)
    if whole is not None and not train.shards.split:
        with _malformed(start.source):
            state.put_optimizer(whole.optimizer, train.shards.parameters, train.optimizer)
    return start, whole


@contextmanager
def _malformed(folder: Path | None) -> Iterator[None]:
    """Turns what is raised for state of another form into BrokenCheckpoint, which names the folder."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenCheckpoint(f"{folder}: its state is malformed: {error!r}") from error


def _read_here(
    job: Job, wanted: str, checkpoints: Path, train: TrainState, run: RunIdentity
) -> tuple[StartPoint, WholeState | None]:
    files.remove_leftovers(checkpoints)
    if wanted == "never":
        _refuse_to_mix(checkpoints)
        return StartPoint(0, None), None
    folder, manifest = _written_since(wanted, checkpoints)
    if folder is None and wanted != "auto" and Path(wanted).is_file():
        return _from_open_clip(Path(wanted), job, train, run.samples)
    if folder is None:
        folder, manifest = _chosen(wanted, checkpoints)
    if folder is None:
        return StartPoint(0, None), None
    _refuse_another_run(folder, manifest, run)
    for change in run.other_figures(manifest):
        log.warning("resume       %s", change)
    try:
        with _malformed(folder):
            whole = state.load(folder, manifest["files"].keys())
            state.put_weights(whole.weights, train)
    except RuntimeError as error:
        raise BrokenCheckpoint(f"{folder}: its weights belong to another model: {error}") from error
    step: int = manifest["step"]
    is_own = files.is_step(folder, checkpoints, step)
    order, bad_samples = manifest["data_order"], _counts(manifest.get("bad_samples"))
    return StartPoint(step, folder, order=order, is_own=is_own, bad_samples=bad_samples), whole


def _counts(recorded: object) -> dict[str, int]:
    """Returns what a manifest counts; what is no count is left out, since no training depends on it."""
    items = recorded.items() if isinstance(recorded, dict) else ()
    return {cause: count for cause, count in items if type(count) is int and count >= 0}


def _written_since(wanted: str, checkpoints: Path) -> tuple[Path | None, dict[str, Any]]:
    """Returns the newest complete checkpoint if a start with the same `checkpoint.resume` wrote it.

    So a job that is queued again continues.
    """
    if wanted != "auto":
        folder, manifest = _chosen("auto", checkpoints)
        if folder is not None and manifest["job"]["checkpoint"].get("resume") == masked(wanted):
            return folder, manifest
    return None, {}


def _chosen(wanted: str, checkpoints: Path) -> tuple[Path | None, dict[str, Any]]:
    """Returns the checkpoint that the job names, or the newest complete one.

    Each broken one is logged and skipped.
    """
    if wanted != "auto":
        try:
            return Path(wanted), _resumable(Path(wanted))
        except BrokenCheckpoint as error:
            raise InputError(f"checkpoint.resume = {wanted}: {error}") from None
    for folder in files.newest_first(checkpoints):
        try:
            return folder, _resumable(folder)
        except BrokenCheckpoint as error:
            log.warning("resume       skipped a broken checkpoint: %s", error)
    return None, {}


def _resumable(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a complete checkpoint that a run can continue from. Raises BrokenCheckpoint."""
    manifest = files.verify(folder)
    check_facts(folder, manifest)
    files.require(folder, manifest["files"], {files.WEIGHTS: dict})
    return manifest


def _refuse_to_mix(checkpoints: Path) -> None:
    for folder in files.newest_first(checkpoints):
        raise InputError(
            f"checkpoint.resume = never, but the run folder has {folder}: "
            "choose another name with --set name=..., set checkpoint.resume = auto, "
            "or move the run folder away (`clipship run --fresh` does that)"
        )


def _refuse_to_forget(checkpoints: Path, had_any: bool, wanted: str) -> None:
    """Raises InputError if the run has steps that cannot be read: it does not begin again by itself."""
    if broken := list(files.newest_first(checkpoints)):
        where = f"the newest of {many(len(broken), 'checkpoint')} is {broken[0]}"
    elif had_any:
        where = "a node had one in memory, and there is no checkpoint"
    else:
        removed = wanted != "never" and saved_step(checkpoints.parent / METRICS_FILE)
        where = f"the checkpoint of step {removed} was saved, and {checkpoints} has none" if removed else ""
    if where:
        raise InputError(
            f"the run has done steps, and none of them can be read ({where}), so it does not begin again by "
            "itself: `clipship run --fresh` does, which moves the run folder aside"
        )


def _refuse_another_run(folder: Path, manifest: Mapping[str, Any], run: RunIdentity) -> None:
    if changes := run.changes(manifest):
        raise InputError(
            f"{folder} is a checkpoint of another run: {'; '.join(changes)}\n"
            f"only the number of ranks and these keys may change: {', '.join(sorted(may_change_keys()))}; "
            "to start from its weights alone, "
            f"set model.pretrained = {folder / files.WEIGHTS} in a run of another name"
        )
    steps = run.begin + schedule(run.job, run.samples).steps
    if manifest["step"] > steps:
        raise InputError(
            f"{folder} is at step {manifest['step']}, and the job ends at step {steps}: --longer and "
            "--shorter take more steps than the run has done"
        )


def _from_open_clip(path: Path, job: Job, train: TrainState, samples: int) -> tuple[StartPoint, WholeState]:
    """Reads a checkpoint of open_clip_train, which is written at the end of an epoch.

    Its steps are those that it counts: an epoch of open_clip_train may have more of them than one here. Where
    its steps had another size, they are as many as its epochs have here. Raises InputError if it leaves
    nothing to train.
    """
    checkpoint = foreign.read(path)
    length = schedule(job, samples)
    by_epochs = checkpoint.epoch * length.epoch_steps
    steps, note = checkpoint.steps(by_epochs, job.optim.global_batch_size)
    if steps >= length.steps:
        raise InputError(
            f"checkpoint.resume = {path}: that file was saved after epoch {checkpoint.epoch}, "
            f"which is step {steps} here, but this job ends at step {length.steps}: raise "
            f"optim.{'steps' if job.optim.steps else 'epochs'}, "
            "or set model.pretrained to load its weights alone"
        )
    whole = foreign.whole_state(checkpoint, train, job.optim.optimizer)
    written = f"{path} was written by open_clip_train after epoch {checkpoint.epoch}"
    log.info("resume       %s, which is step %d here", written, steps)
    if note:
        log.warning("resume       %s", note)
    if job.data.transparency == "white":
        log.warning(
            "resume       transparent parts of pictures are white from here on, and open_clip_train took the "
            'colour that lies in the file: set data.transparency = "drop_alpha" to go on with that'
        )
    return StartPoint(steps, path, is_own=False), whole


_WEIGHTS = ""
"""Key of a weight in the list of tensors; the optimizer's tensors have theirs."""


def scatter(comm: Comm, train: TrainState, whole: WholeState | None) -> None:
    """Collective: copies the contents that rank 0 has into model and optimizer of ranks that split the model.

    The other ranks give None. Tensor by tensor goes to all ranks, and each keeps its own rows: no rank's
    device has the whole model.
    """
    tensors: dict[tuple[str, str], Any] = {}
    if whole is not None:
        tensors = {(name, _WEIGHTS): tensor for name, tensor in whole.weights.items()}
        for name, values in whole.optimizer.items():
            tensors |= {(name, key): value for key, value in values.items()}
    items = comm.broadcast_object([(*place, _described(value)) for place, value in tensors.items()])
    weights = train.shards.state()
    optimizer: dict[str, state.State] = {}
    for name, key, about in items:
        value = _sent(comm, about, tensors.get((name, key)))
        if isinstance(value, Tensor) and value.ndim:
            value = train.shards.own(name, value)
        if key == _WEIGHTS:
            with torch.no_grad():
                weights[name].copy_(value)
        else:
            # A copy: a view would keep the whole tensor.
            optimizer.setdefault(name, {})[key] = value.clone() if isinstance(value, Tensor) else value
    state.put_optimizer(optimizer, train.shards.parameters, train.optimizer)


def _described(value: Any) -> Any:
    """Returns shape and dtype of a tensor, or the value itself if it is none."""
    if not isinstance(value, Tensor):
        return {"value": value}
    return {"shape": tuple(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _sent(comm: Comm, about: Any, value: Any) -> Any:
    """Collective: returns rank 0's value on this rank's device."""
    if "value" in about:
        return about["value"]
    tensor = (
        value.to(comm.device)
        if comm.world.rank == 0
        else torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]), device=comm.device)
    )
    comm.broadcast_(tensor)
    return tensor
