"""Jobs that use a trained model and train nothing: to evaluate it, to embed data, to export it, to search.

Imports no torch.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.config import Job, is_remote
from trainer.config.loader import job_from_table, load_job
from trainer.config.storage import Storage
from trainer.config.stores import Address
from trainer.data.image_folder import image_folder
from trainer.errors import InputError
from trainer.launch.submission import find_run
from trainer.plan.check import check_evaluated
from trainer.run.checkpoints import find_trained
from trainer.text.masking import MASK
from trainer.text.terminal import say

LONGEST_S = 6 * 3600.0
"""Default time limit of an evaluation, in seconds. Nothing else waits for it, as training would; a longer
evaluation hangs or needs `--set timeouts.eval_s=...`."""

_OF_TRAINING: Mapping[str, Any] = {
    "init": None,
    "lora_rank": None,
    "targets": [],
    "grad_checkpointing": False,
}
_OF_THE_USER = {"data": ("storage", "cache", "index"), "model": ("cache_dir",)}
"""Keys by which storage is reached, and of folders that are made: a checkpoint, which may come from others,
chooses neither. The user's own job file in its place does."""
_NO_STORAGE = Storage().model_dump()
_NO_TRAINING_DATA: Mapping[str, Any] = {"train": [], "weights": None, "filters": [], "scores": []}


def evaluation_job(
    checkpoint: str,
    model: str | None,
    asked: Mapping[str, Any],
    nproc: int,
    overrides: Sequence[str],
    suite: Mapping[str, Any] | None = None,
) -> Job:
    """Returns a job that only evaluates.

    Model, data keys and evaluation come from the checkpoint's run, changed as asked. Raises InputError that
    lists every problem.
    """
    table, before = _table_of_trained(checkpoint, model)
    kept = _kept(before, asked, suite or {})
    _check_addresses(checkpoint, kept)
    table |= {
        "name": "eval",
        "optim": {"global_batch_size": nproc, "steps": 1},
        "timeouts": {"eval_s": LONGEST_S},
        "eval": {**kept, **asked},
    }
    if MASK in json.dumps(table["eval"]):
        raise InputError(
            f"{checkpoint}: the data that its run was evaluated on had a secret in its address, which "
            "checkpoints do not keep: give the data with --data or --zero-shot"
        )
    job = job_from_table(_without_unset(table), "clipship eval", overrides)
    if not (job.eval.in_the_run or job.eval.suite.names):
        raise InputError(
            "nothing to evaluate on: give --data for retrieval, --zero-shot for classification, both, or "
            "--suite for public data sets"
        )
    check_evaluated(job)
    return job


def _table_of_trained(checkpoint: str, model: str | None) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Returns [model] and [data] of a job that uses a trained model, and [eval] of the run that trained it.

    `checkpoint` is what the user calls it, `model` what --model names. Raises InputError if there is none.
    """
    trained = find_trained(_run_or_weights(checkpoint))
    name = model or trained.model
    if name is None:
        raise InputError(f"{checkpoint}: no file beside these weights names their model: give --model NAME")
    data, before = (_said_by(checkpoint, trained.job, each) for each in ("data", "model"))
    table = {
        "data": {**data, "format": "synthetic", **_NO_TRAINING_DATA},
        # Where training began, what was trained, and how, no longer counts.
        "model": {**before, "name": name, "pretrained": trained.pretrained, **_OF_TRAINING},
    }
    return table, _said_by(checkpoint, trained.job, "eval")


def _said_by(checkpoint: str, job: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Returns a section of the job that trained a checkpoint, without the keys that are the user's."""
    section = dict((job or {}).get(name) or {})
    left = {key: section.pop(key) for key in _OF_THE_USER.get(name, ()) if key in section}
    if left and _is_job_file(checkpoint):
        own = getattr(load_job(Path(checkpoint)), name)
        return {**section, **own.model_dump(mode="json", include=left.keys())}
    if named := [f"{name}.{key}" for key, value in left.items() if value and value != _NO_STORAGE]:
        say(
            f"{checkpoint}: {' and '.join(named)} of the run that trained it are not used, since a "
            "checkpoint may come from others: name the run by its job file, or set them with --set"
        )
    return section


def _check_addresses(checkpoint: str, evaluation: Mapping[str, Any]) -> None:
    """Raises InputError if a run was evaluated on an address that a checkpoint may not name."""
    for name in chain.from_iterable(evaluation.get(key) or () for key in ("retrieval", "zero_shot")):
        if is_remote(str(name)):
            try:
                Address.of_data(name)
            except InputError as problem:
                raise InputError(
                    f"{checkpoint}: of the data that its run was evaluated on, {problem}: give the data with "
                    "--data or --zero-shot"
                ) from None


def _run_or_weights(name: str) -> str:
    """Returns the run folder of a job file, or of a run in ./runs; else the name itself."""
    is_run = _is_job_file(name) or (Path("runs", name).is_dir() and not Path(name).exists())
    return str(find_run(name)) if is_run else name


def _is_job_file(name: str) -> bool:
    return name.endswith(".toml") and Path(name).is_file()


def _kept(before: Mapping[str, Any], asked: Mapping[str, Any], suite: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that stay from the run's own evaluation, with those asked of the suite.

    Its data sets are dropped if others are asked for, and its class names if the folders asked for name the
    classes.
    """
    others = bool({"retrieval", "zero_shot"} & asked.keys() or "names" in suite)
    other_sets = {"retrieval", "zero_shot"} if others else set()
    other_classes = {"class_names"} if image_folder(asked.get("zero_shot", ())) else set()
    kept = {key: value for key, value in before.items() if key not in other_sets | other_classes}
    names = {"names": ()} if others else {}
    return {**kept, "suite": {**before.get("suite", {}), **names, **suite}}


def _without_unset(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table without the keys that hold None, as a job file leaves them out."""
    return {
        key: _without_unset(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def _checked(table: Mapping[str, Any], command: str, overrides: Sequence[str] = ()) -> Job:
    job = job_from_table(_without_unset(table), command, overrides)
    check_evaluated(job)
    return job


def export_job(checkpoint: str, model: str | None) -> Job:
    """Returns a job that only uses the model, in its own precision. Raises InputError with every problem."""
    table, _ = _table_of_trained(checkpoint, model)
    table["model"] = {key: value for key, value in table["model"].items() if key != "precision"}
    table |= {"name": "export", "optim": {"global_batch_size": 1, "steps": 1}}
    return _checked(table, "clipship export")


def embed_job(
    checkpoint: str,
    model: str | None,
    shards: Sequence[str],
    ranks: int,
    overrides: Sequence[str],
    of: Job | None = None,
) -> Job:
    """Returns a job that only embeds shards, as the retrieval set of an evaluation.

    How samples are read comes from the job `of` that is to train on them, or from the checkpoint's run.
    Raises InputError that lists every problem.
    """
    table, evaluation = _table_of_trained(checkpoint, model)
    if of is not None:
        table["data"] = {**of.data.model_dump(exclude_unset=True), "format": "synthetic", **_NO_TRAINING_DATA}
        table["seed"] = of.seed
    table |= {
        "name": "embed",
        "optim": {"global_batch_size": ranks, "steps": 1},
        "timeouts": {"eval_s": LONGEST_S},
        "eval": {**_batch_size(evaluation), "retrieval": list(shards)},
    }
    return _checked(table, "clipship embed", overrides)


def _batch_size(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in evaluation.items() if key == "batch_size"}


def search_job(checkpoint: str, model: str | None, overrides: Sequence[str]) -> Job:
    """Returns a job that only uses the model, with the limits of its run for pictures.

    Raises InputError that lists every problem.
    """
    table, evaluation = _table_of_trained(checkpoint, model)
    table |= {
        "name": "search",
        "optim": {"global_batch_size": 1, "steps": 1},
        "eval": _batch_size(evaluation),
    }
    return _checked(table, "clipship search", overrides)
