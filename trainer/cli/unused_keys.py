"""Finds keys that a job file sets and that change nothing, because other keys leave them without use.

One row of a table for each reason. Keys of [slurm] and [kubernetes] are left out: only that scheduler reads
them. Pure; imports no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from trainer.comm.backends import launchers_of, over_mpi, row_of
from trainer.config import Data, Job
from trainer.config.comm import TorchComm
from trainer.config.formats import FORMATS
from trainer.config.loader import own_keys
from trainer.config.losses import LOSSES
from trainer.config.optimizers import OPTIMIZERS
from trainer.config.schedulers import SCHEDULERS


@dataclass(frozen=True)
class UnusedKeys:
    """Keys that have no effect on a run for one reason."""

    keys: tuple[str, ...]
    """Names of keys; that of a section stands for each key in it."""
    unused: Callable[[Job], bool]
    why: str
    """Clause that follows a colon; `{backend}` stands for the job's comm.backend, and `{optimizer}` for its
    optimizer.
    """


def _trains_with(job: Job, key: str) -> bool:
    """Returns whether the format of the training data reads the key of `[data]`."""
    return key in FORMATS[job.data.kind].reads


def _reads(job: Job, key: str) -> bool:
    """Returns whether a format that training or retrieval reads has the key of `[data]`."""
    retrieval: tuple[Data, ...] = (job.retrieval_data,) if job.eval.retrieval else ()
    return any(key in FORMATS[data.kind].reads for data in (job.data, *retrieval))


def _evaluates(job: Job) -> bool:
    return bool(job.eval.retrieval or job.eval.zero_shot)


def _is_measured(job: Job) -> bool:
    """Returns whether the job evaluates, or says where `clipship eval` finds a suite."""
    return _evaluates(job) or bool(job.eval.suite.root or job.eval.suite.folders)


def _is_one_folder(job: Job) -> bool:
    """Returns whether the zero-shot set is named as one folder, and not by shards or a pattern."""
    names = job.eval.zero_shot
    return len(names) == 1 and not PurePosixPath(names[0]).suffix and not set("*?[{") & set(names[0])


def _never_steps_without_update(job: Job) -> bool:
    return job.health.non_finite == "stop" and job.model.precision != "fp16"


def _optimizer_ignores(key: str, job: Job) -> bool:
    return key not in OPTIMIZERS[job.optim.optimizer].reads


def _is_over_gloo(job: Job) -> bool:
    """Returns whether Horovod's ranks meet over Gloo."""
    if not row_of(job).over_mpi:
        return False
    return not any(over_mpi(job, launcher) for launcher in launchers_of(job))


def _backend_ignores(key: str, job: Job) -> bool:
    return not any(f"{key}.".startswith(f"{read}.") for read in row_of(job).reads)


_NCCL = ("comm.nccl.algo", "comm.nccl.ib_hca", "comm.nccl.debug")
_DDP = tuple(f"comm.torch.{name}" for name in TorchComm.model_fields if name != "device_backend")

UNUSED_KEYS = (
    UnusedKeys(
        ("optim.contrast_weight", "optim.caption_weight"),
        lambda job: not LOSSES[job.optim.loss].captions,
        'optim.loss is not "coca"',
    ),
    UnusedKeys(("optim.distill_weight",), lambda job: job.model.teacher is None, "there is no model.teacher"),
    UnusedKeys(
        ("data.synthetic_samples",),
        lambda job: not _trains_with(job, "synthetic_samples"),
        'data.format is not "synthetic"',
    ),
    UnusedKeys(
        ("data.max_bad_share", "data.on_bad_sample"),
        lambda job: not _trains_with(job, "on_bad_sample") and not _is_measured(job),
        'data.format = "synthetic" has no bad samples',
    ),
    UnusedKeys(
        ("data.max_image_pixels", "data.max_member_bytes"),
        lambda job: not _trains_with(job, "max_member_bytes") and not _is_measured(job),
        'data.format = "synthetic" reads no file',
    ),
    UnusedKeys(
        ("data.image_key",),
        lambda job: not (_reads(job, "image_key") or job.eval.zero_shot),
        "the job reads no shards",
    ),
    UnusedKeys(
        ("data.caption_key", "data.caption_lines"),
        lambda job: not _reads(job, "caption_key"),
        "neither training nor retrieval reads shards",
    ),
    UnusedKeys(
        ("data.caption_lines",),
        lambda job: job.data.caption_keys.paths is not None,
        "captions come from JSON, where each text is one",
    ),
    UnusedKeys(
        ("data.image_column", "data.caption_column"),
        lambda job: not _reads(job, "image_column"),
        "neither training nor retrieval reads a table",
    ),
    UnusedKeys(
        ("data.separator", "data.quotes"),
        lambda job: not _reads(job, "separator"),
        "neither training nor retrieval reads a .csv or .tsv table",
    ),
    UnusedKeys(
        ("data.shuffle_window",),
        lambda job: job.data.order != "window" and not job.data.streams,
        'the order is that of lanes, which data.block_samples belongs to; data.order = "window" has a window',
    ),
    UnusedKeys(("data.cache_gb",), lambda job: job.data.cache is None, "there is no data.cache"),
    UnusedKeys(
        ("data.block_samples", "data.read_ahead_mb", "data.cache"),
        lambda job: job.data.order == "window",
        'data.order is "window"',
    ),
    UnusedKeys(
        ("data.block_samples", "data.read_ahead_mb", "data.cache"),
        lambda job: not _trains_with(job, "block_samples") or job.data.streams,
        "training reads no shards by offset",
    ),
    UnusedKeys(
        ("data.augment.rand_augment_magnitude",),
        lambda job: not job.data.augment.rand_augment_ops,
        "data.augment.rand_augment_ops is 0",
    ),
    UnusedKeys(
        ("data.augment.color_jitter",),
        lambda job: not job.data.augment.color_jitter_prob,
        "data.augment.color_jitter_prob is 0",
    ),
    UnusedKeys(
        ("data.augment.erase_count",),
        lambda job: not job.data.augment.erase_prob,
        "data.augment.erase_prob is 0",
    ),
    UnusedKeys(
        ("data.row_group_cache_mb",),
        lambda job: not _reads(job, "row_group_cache_mb"),
        "neither training nor retrieval reads Parquet or Arrow",
    ),
    UnusedKeys(
        ("data.caption_column",),
        lambda job: bool(job.data.caption_template),
        "data.caption_template names the columns",
    ),
    UnusedKeys(
        ("data.caption_choice",),
        lambda job: job.data.kind == "table" and len(job.data.caption_entries) == 1,
        "a row of a table has one caption",
    ),
    UnusedKeys(
        ("data.filters",),
        lambda job: not _trains_with(job, "filters"),
        'data.format = "synthetic" has no sample to leave out',
    ),
    UnusedKeys(
        ("data.caption_weights", "data.caption_template"),
        lambda job: not _reads(job, "caption_template"),
        'data.format = "synthetic" has captions of its own',
    ),
    UnusedKeys(
        ("data.encoding",),
        lambda job: not _reads(job, "encoding"),
        "the job reads no text that may have another encoding",
    ),
    UnusedKeys(
        ("data.index",),
        lambda job: not _trains_with(job, "index") or job.data.streams,
        "the training data have no index",
    ),
    UnusedKeys(
        ("data.stream_samples",), lambda job: not job.data.streams, "data.train names no stream (pipe:, -)"
    ),
    UnusedKeys(
        ("data.max_bad_share",),
        lambda job: job.data.on_bad_sample == "fail",
        'data.on_bad_sample = "fail" allows no bad sample',
    ),
    UnusedKeys(
        ("eval.every_steps", "eval.every_epochs", "timeouts.eval_s"),
        lambda job: not _evaluates(job),
        "eval.retrieval and eval.zero_shot name no data",
    ),
    UnusedKeys(
        ("eval.batch_size",),
        lambda job: not _is_measured(job),
        "eval.retrieval, eval.zero_shot and eval.suite name no data",
    ),
    UnusedKeys(
        ("eval.class_key", "eval.class_names"),
        lambda job: not job.eval.zero_shot,
        "eval.zero_shot names no data",
    ),
    UnusedKeys(
        ("eval.templates",),
        lambda job: not (job.eval.zero_shot or job.eval.suite.folders),
        "eval.zero_shot and eval.suite.folders name no data",
    ),
    UnusedKeys(("eval.class_key",), _is_one_folder, "the folders of eval.zero_shot are the classes"),
    UnusedKeys(
        (
            "model.cudnn_benchmark",
            "model.cuda_graphs",
            "resources.gpu",
            "resources.fabric",
            "resources.bind_cpus",
            *_NCCL,
        ),
        lambda job: job.resources.on_cpu,
        "[resources] asks for the CPU",
    ),
    UnusedKeys(
        ("model.cudnn_benchmark",),
        lambda job: job.comm.deterministic,
        "comm.deterministic = true turns it off",
    ),
    *(
        UnusedKeys(keys, partial(_backend_ignores, keys[0]), 'comm.backend is "{backend}"')
        for keys in (_DDP, ("comm.torch.device_backend",), ("comm.fsdp",), ("comm.horovod",))
    ),
    UnusedKeys(
        ("comm.horovod.hierarchical_allreduce", "comm.horovod.hierarchical_allgather"),
        _is_over_gloo,
        "Gloo connects the ranks, and Horovod does that over MPI alone (comm.launcher)",
    ),
    UnusedKeys(
        _NCCL,
        lambda job: (
            job.comm.torch.device_backend == "gloo" and not _backend_ignores("comm.torch.device_backend", job)
        ),
        'comm.torch.device_backend = "gloo" does without NCCL',
    ),
    UnusedKeys(
        (*_DDP, "comm.horovod.compression"),
        lambda job: job.comm.deterministic and not row_of(job).splits_model,
        "comm.deterministic = true adds gradients up in another way",
    ),
    UnusedKeys(
        tuple(
            f"recovery.{name}"
            for name in ("same_fault_limit", "backoff_s", "keep_in_memory", "keep_every_steps")
        ),
        lambda job: not job.recovery.max_restarts,
        "recovery.max_restarts is 0, so the first fault ends the run",
    ),
    UnusedKeys(
        ("recovery.keep_every_steps",),
        lambda job: not job.recovery.keep_in_memory,
        "recovery.keep_in_memory = false keeps no step",
    ),
    UnusedKeys(
        ("optim.cooldown_power",), lambda job: not job.optim.cooldown_share, "optim.cooldown_share is 0"
    ),
    UnusedKeys(
        ("optim.min_lr",),
        lambda job: job.optim.schedule == "constant" and not job.optim.cooldown_share,
        'optim.schedule = "constant" without optim.cooldown_share never falls',
    ),
    *(
        UnusedKeys(
            (f"optim.{key}",), partial(_optimizer_ignores, key), 'optim.optimizer = "{optimizer}" has none'
        )
        for key in ("beta1", "beta2", "eps")
    ),
    UnusedKeys(
        ("optim.ema_from_step",), lambda job: job.optim.ema_decay is None, "optim.ema_decay is not set"
    ),
    UnusedKeys(
        ("optim.no_decay",), lambda job: not job.optim.weight_decay, "optim.weight_decay = 0 decays nothing"
    ),
    UnusedKeys(
        ("optim.image_lr", "optim.image_layer_decay"),
        lambda job: job.model.unlocked[0] == 0,
        "model.lock_image = true trains nothing of the image tower",
    ),
    UnusedKeys(
        ("optim.text_lr", "optim.text_layer_decay"),
        lambda job: job.model.unlocked[1] == 0,
        "model.lock_text = true trains nothing of the text tower",
    ),
    UnusedKeys(("logging.wandb_project",), lambda job: job.logging.wandb == "off", 'logging.wandb is "off"'),
    UnusedKeys(("health.preflight_s",), lambda job: not job.health.preflight, "health.preflight is false"),
    UnusedKeys(
        ("health.non_finite_in_a_row",),
        _never_steps_without_update,
        'health.non_finite = "stop" ends the run at the first such step',
    ),
    UnusedKeys(
        ("image", "stack"),
        lambda job: job.image.tag is None,
        "image.tag is not set, so the job has no image",
    ),
    UnusedKeys(
        ("image.cuda_home",),
        lambda job: "base" not in (job.image.toolkit, job.stack.torch),
        'neither image.toolkit nor stack.torch is "base"',
    ),
    UnusedKeys(
        ("resources.mem_gb_per_gpu", "resources.fabric"),
        lambda job: not job.schedulers,
        "the job names no scheduler ([slurm], [kubernetes])",
    ),
)
"""Rows in the order in which they are reported; the first that holds for a key gives the reason."""


def unused_keys(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields keys that the job sets without effect, with the reason; each key once."""
    left = list(_set_keys(job))
    for row in UNUSED_KEYS:
        keys = tuple(key for key in left if any(f"{key}.".startswith(f"{name}.") for name in row.keys))
        if keys and row.unused(job):
            left = [key for key in left if key not in keys]
            yield keys, row.why.format(backend=job.comm.backend, optimizer=job.optim.optimizer)


def _set_keys(job: Job) -> Iterator[str]:
    """Yields the keys that the job's file sets.

    A file that sets all keys was written by Clipship; then only those count that differ from the default.
    """
    needed = {name for name in type(job).model_fields if name not in SCHEDULERS}
    return _names(own_keys(job, but_defaults=needed <= job.model_fields_set))


def _names(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in ("env", "image.env"):
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
