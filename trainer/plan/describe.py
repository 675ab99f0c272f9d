"""Text that `clipship check` prints: the run that a job and a world make.

Writes nothing; imports no torch.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from trainer.comm.backends import connection
from trainer.config import Data, Eval, Job, Model, Optim, is_remote
from trainer.config.batch_plan import BatchPlan, batch_text, plan, steps_per_epoch
from trainer.config.formats import FORMATS
from trainer.config.learning_rate import words
from trainer.config.losses import LOSSES
from trainer.config.optimizers import OPTIMIZERS
from trainer.config.stack_table import KnownBad, table
from trainer.config.tables import toml_text
from trainer.data.image_folder import image_folder
from trainer.data.reading_plan import reading_rows
from trainer.data.shard_names import expand_shards
from trainer.data.storage import storage_rows
from trainer.estimate.fit import with_gpu_limit
from trainer.evaluate.suite_data import find_sets
from trainer.launch.schedulers import launchers_of, scheduler
from trainer.model.image_tokens import image_tokens, lost_pixels, not_recomputed
from trainer.model.text_size import text_parameters
from trainer.plan.check import LaterStage, later_stages
from trainer.plan.device import device_rows, gpu_rows, no_gpu_here, on_gpus, scaling_rows, too_large
from trainer.plan.disk import Disk, checkpoint_rows, disk_of, too_little_disk
from trainer.plan.environment import environment_row, missing_here, not_in_the_image
from trainer.plan.first_samples import FirstSamples
from trainer.plan.hub_parts import not_fetched
from trainer.plan.places import odd_places
from trainer.plan.save import SaveTime, interval_rows, save_rows, save_time, too_little_notice
from trainer.plan.secret_values import secret_warnings
from trainer.plan.spares import no_spares, with_spares
from trainer.plan.state_memory import in_memory, too_little_memory
from trainer.plan.unused_keys import unused_keys
from trainer.run.folder import run_folder, used_again
from trainer.sysinfo.variables import name_problems
from trainer.sysinfo.versions import PACKAGE, installed, unsupported
from trainer.text.table import by_topic
from trainer.text.terminal import shown
from trainer.text.wording import many

_SMALL_CONTRAST = 16


def describe(job: Job, world_size: int, samples: int | None, *, local: bool, files: bool = True) -> str:
    """Returns aligned lines, one per topic, with the warnings last.

    `samples` None means not counted yet; `local` means ranks on this machine, not those of [resources];
    `files` lets the files that the job names be opened. Raises InputError if the launcher cannot start the
    backend.
    """
    facts = Facts.of(job, world_size, samples, local=local, files=files)
    rows = [
        *rows_of(facts),
        *(("warning", text) for text in all_warnings(facts)),
        *(("no effect", f"{', '.join(keys)}: {why}") for keys, why in unused_keys(job)),
    ]
    return "".join(f"{line}\n" for line in by_topic(rows))


@dataclass(frozen=True)
class Facts:
    """A job, and what is known of the place where it runs."""

    job: Job
    planned: Job
    """The job with a number in place of "auto"."""
    batch_plan: BatchPlan
    samples: int | None
    local: bool
    files: bool
    disk: Disk | None
    save: SaveTime | None
    first: FirstSamples | None
    """The begin of the training data; None if no file may be opened."""
    later: Sequence[LaterStage]
    """Stages that follow the job's own training."""

    @classmethod
    def of(cls, job: Job, world_size: int, samples: int | None, *, local: bool, files: bool) -> "Facts":
        """Looks at the machine and the run folder; the arguments are those of `describe`."""
        planned = with_gpu_limit(job, world_size)
        batch_plan = plan(planned, world_size)
        disk = disk_of(job, local=local) if files else None
        save = save_time(job, batch_plan, files=files)
        first = FirstSamples(job) if files else None
        later = later_stages(job, world_size, samples)
        return cls(job, planned, batch_plan, samples, local, files, disk, save, first, later)


def rows_of(facts: Facts) -> list[tuple[str, str]]:
    """Returns topic and text of each line that describes the run; a line without a topic continues one."""
    job, samples, local, files = facts.job, facts.samples, facts.local, facts.files
    world_size = facts.batch_plan.world_size
    return [
        ("job", f"{job.name}, seed {job.seed}"),
        ("model", _model(job)),
        (
            "data",
            _data(job.data, samples)
            if files or not FORMATS[job.data.kind].unit
            else f"not checked: {_named(job.data.train)}",
        ),
        *(score_rows(job) if files else ()),
        *(facts.first.rows() if facts.first is not None else ()),
        *(reading_rows(job, facts.batch_plan) if files else ()),
        *storage_rows(job),
        ("world", _world(job, world_size, local=local)),
        *device_rows(job, local=local),
        environment_row(job, local=local),
        ("batch", batch_text(facts.planned, facts.batch_plan)),
        *(gpu_rows(job, facts.batch_plan, total_steps(job, samples)) if on_gpus(job, local=local) else []),
        *(scaling_rows(job, facts.batch_plan) if not local and on_gpus(job, local=local) else []),
        ("backend", _backend(job, local=local)),
        ("steps", _steps(job, samples)),
        ("learning", _learning(job)),
        ("optimizer", _optimizer(job)),
        *_stages(facts),
        ("evaluation", _evaluation(job, files=files)),
        *suite_rows(job.eval, files=files),
        *(("in memory", text) for text in in_memory(job)),
        ("run folder", str(run_folder(job))),
        *checkpoint_rows(job, facts.disk),
        *save_rows(facts.save),
        *(interval_rows(job, facts.save) if not local else ()),
        *(_summaries(job) if not local else []),
    ]


def all_warnings(facts: Facts) -> Iterator[str]:
    """Yields a sentence for each thing that is too small or missing where the job runs; then `warnings`."""
    job, local = facts.job, facts.local
    if facts.first is not None:
        yield from facts.first.warnings()
    yield from no_gpu_here(job, local=local)
    yield from missing_here(job, local=local)
    if local:
        yield from _known_bad_here(job)
    in_image = job.in_image and not local
    untried = "" if job.resources.on_cpu else job.resources.row.doubt
    yield from filter(None, [untried, unsupported(job.stack.open_clip if in_image else installed(PACKAGE))])
    yield from too_little_disk(job, facts.disk)
    yield from too_little_memory(job, local=local)
    yield from no_spares(job, local=local)
    if not local:
        yield from too_little_notice(job, facts.save)
    if on_gpus(job, local=local):
        yield from too_large(job, facts.batch_plan)
    own = list(warnings(job, facts.samples, local=local))
    yield from own
    yield from (text for text in _of_stages(facts) if text.partition(": ")[2] not in own)


def _of_stages(facts: Facts) -> Iterator[str]:
    """Yields the warnings about each later stage, which begin with its title."""
    for stage in facts.later:
        if on_gpus(stage.job, local=facts.local):
            yield from (f"{stage.title}: {text}" for text in too_large(stage.job, stage.batch_plan))
        for text in warnings(stage.job, stage.samples, local=facts.local):
            yield f"{stage.title}: {text}"


def _stages(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yields rows about each later stage: its own keys, its length, and what it takes of a GPU."""
    for stage in facts.later:
        keys = ", ".join(f"{key} = {toml_text(value)}" for key, value in stage.keys.items())
        topic, named, name = stage.title.partition(" (")
        yield topic, f"{name.removesuffix(')')}: {keys}" if named else keys
        batch = batch_text(stage.planned, stage.batch_plan)
        yield "", f"steps {_steps(stage.job, stage.samples)}; batch {batch}"
        yield "", _learning(stage.job)
        if on_gpus(stage.job, local=facts.local):
            steps = total_steps(stage.job, stage.samples)
            yield from (
                ("", f"{about} {text}".strip())
                for about, text in gpu_rows(stage.job, stage.batch_plan, steps)
            )


def _summaries(job: Job) -> Iterator[tuple[str, str]]:
    """Yields one row for each scheduler of the job that has a summary."""
    for name in job.schedulers:
        if text := scheduler(name).summary(job):
            yield name, text


def warnings(job: Job, samples: int | None, *, local: bool = False, to: str | None = None) -> Iterator[str]:
    """Yields a sentence for each setting that is allowed but rarely meant.

    A local run has nothing to do with the image and the schedulers of its job, and one that is submitted
    `to` a scheduler nothing with the others.
    """
    optim = job.optim
    if taken := used_again(job):
        yield taken
    if LOSSES[optim.loss].contrast == "clip" and optim.global_batch_size < _SMALL_CONTRAST:
        yield (
            f"a global batch of {optim.global_batch_size} compares each pair with few others: a model learns "
            "better with hundreds or more"
        )
    steps = total_steps(job, samples)
    if steps is not None and optim.warmup_steps > steps:
        yield (
            f"warmup_steps {optim.warmup_steps} is longer than the run of {steps} steps: lr {optim.lr:g} "
            "is never reached"
        )
    if job.model.precision == "fp16" and not job.resources.row.here:
        yield (
            "precision fp16 needs a GPU for each rank, and this machine has none: bf16 and fp32 also run "
            "on CPUs"
        )
    if job.model.unlocked == (0, 0) and not job.model.pretrained:
        yield "both towers are locked and nothing is pretrained: there is hardly anything to learn"
    yield from lost_pixels(job.model)
    yield from not_recomputed(job.model)
    yield from not_fetched(job)
    if not local:
        yield from _of_clusters(job, [to] if to else list(job.schedulers))
    yield from secret_warnings(job)
    torch = None if job.stack.torch == "base" else job.stack.torch
    yield from name_problems(job.env, torch, os.environ)


def _of_clusters(job: Job, schedulers: Sequence[str]) -> Iterator[str]:
    yield from odd_places(job)
    if job.in_image:
        yield from not_in_the_image(job)
    if job.image.tag is not None:
        yield from _known_bad(job)
    for name in schedulers:
        yield from scheduler(name).warnings(job)


def _known_bad(job: Job) -> Iterator[str]:
    if job.stack.torch == "base":
        return
    variables = [f"{name}={value}" for name, value in {**job.image.env, **job.env}.items()]
    for bad in table().stack(job.stack.torch, job.stack.nccl).known_bad:
        if job.resources.nodes >= bad.from_nodes and bad.unless not in variables and _applies(bad, job):
            yield f"torch {job.stack.torch}: {bad.text}"


def _known_bad_here(job: Job) -> Iterator[str]:
    """Yields what is known of the torch that is installed here, with the keys of this job."""
    release = installed("torch").partition("+")[0]
    for row in table().rows:
        for bad in row.known_bad if row.torch == release else ():
            if bad.only_with and _applies(bad, job):
                yield f"torch {release}: {bad.text}"


def _applies(bad: KnownBad, job: Job) -> bool:
    section, _, key = bad.only_with.partition(".")
    return not key or bool(getattr(getattr(job, section), key))


def _model(job: Job) -> str:
    begins = [("from", job.model.pretrained), ("beginning with what fits of", job.model.init)]
    start = "".join(f", {how} {weights}" for how, weights in begins if weights)
    until = job.model.unlock_after_step
    towers = "".join(
        f", {tower} tower locked"
        + (f" but its last {many(groups, 'group')} of layers" if groups else "")
        + (f" until step {until:,}" if until else "")
        for tower, groups in zip(("image", "text"), job.model.locked, strict=True)
        if groups is not None
    )
    where = "both towers" if job.model.lora_towers == "both" else f"the {job.model.lora_towers} tower"
    adapted = f", LoRA of rank {job.model.lora_rank} in {where}" if job.model.lora_rank else ""
    compiled = ", compiled" if job.model.compile else ""
    own = f"{job.model.name}{_text_tower(job.model)}{_any_shape(job.model)}"
    return f"{own}, {job.model.precision}, {job.optim.loss_text}{start}{towers}{adapted}{compiled}"


def _any_shape(model: Model) -> str:
    """Returns how many patches the images of a model have that takes any shape; "" for others."""
    tokens = image_tokens(model)
    if tokens is None:
        return ""
    *others, last = model.token_budgets or (tokens,)
    most = " or ".join([*(f"{each:,}" for each in others), many(last, "patch", "patches")])
    edges = " or ".join(f"{edge} x {edge}" for edge in model.image_patches or ())
    return f", images of any shape in up to {most}" + (f" of {edges} pixels" if edges else "")


def _text_tower(model: Model) -> str:
    """Returns the text tower of Hugging Face that a job puts in place of the model's own, with its size."""
    if model.text is None:
        return ""
    count = text_parameters(model)
    return f" with the text tower {model.text}" + (f" ({count / 1e6:,.1f} M parameters)" if count else "")


def _data(data: Data, samples: int | None) -> str:
    unit = FORMATS[data.kind].unit
    if not unit:
        return f"synthetic, {many(data.synthetic_samples, 'sample')} per epoch"
    files = expand_shards(data.train)
    counted = "samples are counted at the start" if samples is None else many(samples, "sample")
    return f"{many(len(files), unit)}, {counted}: {files[0]}" + (
        f" ... {files[-1]}" if len(files) > 1 else ""
    )


def _world(job: Job, world_size: int, *, local: bool) -> str:
    if local:
        return f"{many(world_size, 'rank')} on this machine"
    nodes, per_node = job.resources.nodes, job.resources.ranks_per_node
    unit = "GPU" if job.asks_for_gpus else "rank"
    return (
        f"{many(world_size, 'rank')}: {many(nodes, 'node')} of {many(per_node, unit)} ([resources])"
        f"{with_spares(job)}"
    )


def _backend(job: Job, *, local: bool) -> str:
    ways = [connection(job, launcher) for launcher in launchers_of(job, local=local)]
    over = f" over {' or '.join(dict.fromkeys(ways))}" if any(ways) else ""
    return f"{job.comm.backend}{over}, ranks started by {_launcher(job, local=local)}"


def _launcher(job: Job, *, local: bool) -> str:
    if not local:
        for name in job.schedulers:
            return f"{scheduler(name).starter(job)} ([{name}])"
    launcher = launchers_of(job, local=local)[0]
    return f"{launcher} (auto)" if job.comm.launcher == "auto" else launcher


def total_steps(job: Job, samples: int | None) -> int | None:
    """Returns the length of the run in steps; None if its samples are not counted yet."""
    if job.optim.steps is not None:
        return job.optim.steps
    if samples is None:
        return None
    return (job.optim.epochs or 0) * steps_per_epoch(samples, job.optim.global_batch_size)


def _steps(job: Job, samples: int | None) -> str:
    size, epochs = job.optim.global_batch_size, job.optim.epochs
    if samples is None:
        return (
            f"{job.optim.steps:,}"
            if epochs is None
            else f"{many(epochs, 'epoch')}; samples are counted at the start"
        )
    per_epoch = steps_per_epoch(samples, size)
    remainder = samples - per_epoch * size
    tail = f"; {many(remainder, 'sample')} of each epoch left out" if remainder else ""
    total = f"{total_steps(job, samples):,}"
    if not per_epoch:
        return total
    return f"{total} = {_epochs(job, per_epoch)} x {many(per_epoch, 'step')}{tail}"


def _epochs(job: Job, per_epoch: int) -> str:
    """Returns the length of the run in epochs, which is no whole number where the job gives steps."""
    if job.optim.epochs is not None:
        return many(job.optim.epochs, "epoch")
    count = (job.optim.steps or 0) / per_epoch
    return "1 epoch" if count == 1 else f"{count:,.0f} epochs" if count >= 100 else f"{count:.3g} epochs"


def _learning(job: Job) -> str:
    optim = job.optim
    clip = f", gradient norm at most {optim.grad_clip_norm:g}" if optim.grad_clip_norm else ""
    return f"lr {optim.lr:g} after {many(optim.warmup_steps, 'warm-up step')}, {words(optim)}{clip}"


def _optimizer(job: Job) -> str:
    optim = job.optim
    betas = ", ".join(f"{key} {getattr(optim, key):g}" for key in OPTIMIZERS[optim.optimizer].reads)
    rates = [
        f"{tower} tower: lr {optim.lr if peak is None else peak:g}"
        + (f", each layer {decay:g} of the next one's" if decay < 1 else "")
        for tower, peak, decay in (
            ("image", optim.image_lr, optim.image_layer_decay),
            ("text", optim.text_lr, optim.text_layer_decay),
        )
        if peak is not None or decay < 1
    ]
    return "; ".join([f"{optim.optimizer}, {betas}", _decay(optim), *rates])


def _decay(optim: Optim) -> str:
    spared = "".join(f", nor on {pattern}" for pattern in optim.no_decay)
    pulls = [
        f"weight decay {optim.weight_decay:g}" if optim.weight_decay else "",
        f"anchor {optim.anchor:g} to the first weights" if optim.anchor else "",
    ]
    pulling = " and ".join(filter(None, pulls))
    return f"{pulling}, not on gains, biases and the logit scale{spared}" if pulling else "no weight decay"


def _evaluation(job: Job, *, files: bool) -> str:
    show = _files if files else _named
    parts = [
        *(
            ["zero-shot on " + ((files and image_folder(job.eval.zero_shot)) or show(job.eval.zero_shot))]
            if job.eval.zero_shot
            else []
        ),
        *(["retrieval on " + show(job.eval.retrieval)] if job.eval.retrieval else []),
    ]
    if not parts:
        return "none ([eval] names no data)"
    every = [f"every {many(job.eval.every_steps, 'step')}"] if job.eval.every_steps else []
    every += [f"every {many(job.eval.every_epochs, 'epoch')}"] if job.eval.every_epochs else []
    return ", ".join([" and ".join(parts), *every, "at the end"])


def _named(patterns: Sequence[str]) -> str:
    return patterns[0] + (f" and {len(patterns) - 1} more" if len(patterns) > 1 else "")


def _files(patterns: Sequence[str]) -> str:
    return many(len(expand_shards(patterns)), "file")


def score_rows(job: Job) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the line; none for scores behind addresses, which may be far and large."""
    data = job.data
    if not data.scores or any(map(is_remote, data.scores)) or not find_spec("pyarrow"):
        return
    from trainer.data.scores import kept_of_all, scored, scores_of  # imports numpy

    if (scores := scores_of(data)) is None:
        return
    kept, of = kept_of_all(scores, data.filters)
    filters = ", ".join(each.text for _, each in scored(data.filters))
    yield "scores", f"{kept:,} of {many(of, 'sample')} with a row pass {filters}"


def suite_rows(evaluation: Eval, *, files: bool) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the lines of `clipship check` about the suite."""
    suite = evaluation.suite
    if not suite.names:
        return
    names = ", ".join(suite.names)
    if not files:
        yield "suite", names
        return
    suites = find_sets(evaluation)
    total = len(suites.sets) + len(suites.missing)
    there = ", ".join(each.row.name for each in suites.sets)
    yield (
        "suite",
        shown(f"{names}: {len(suites.sets)} of {many(total, 'set')} on disk" + (there and f": {there}")),
    )
    if absent := ", ".join(each.row.name for each in suites.missing if not each.there):
        yield "", shown(f"not on disk: {absent}")
    for each in suites.missing:
        if each.there:
            yield "", shown(f"not whole: {each.row.name}: {each.why}")
    yield "", "`clipship eval RUN` measures the sets on disk; the run itself does not"
