"""Finds the model and its weights for what a user calls a checkpoint.

Reads names and manifests only, never weights; imports no torch. A checkpoint's files may be links, as in
caches of Hugging Face's, git-annex and DVC.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import InputError
from trainer.run.find import run_hint
from trainer.run.layout import CHECKPOINTS, JOB_FILE
from trainer.safe_io.plain import lines_from_end, read_json, read_plain
from trainer.text.masking import masked

BEST = "best.json"
BEST_NAME = "best"
"""Last part of a path that stands for the best checkpoint of the run folder before it."""


def folder_name(step: int) -> str:
    """Returns the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step of a checkpoint's folder; None for each other name, such as that of a user's copy."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and name == folder_name(int(digits)) else None


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """Returns the checkpoint folders by their steps, oldest first, complete or broken.

    Whatever else lies there is the user's: it is neither read nor touched.
    """
    steps = ((step_of(path.name), path) for path in checkpoints.glob("step-*"))
    return dict(sorted((step, path) for step, path in steps if step is not None and path.is_dir()))


def read_best(checkpoints: Path) -> dict[str, Any] | None:
    """Returns the recorded step, metric and value; None if none is recorded."""
    try:
        best = read_json(checkpoints / BEST, links=True)
    except (OSError, ValueError):
        return None
    kinds = {"step": int, "metric": str, "value": int | float}
    whole = isinstance(best, dict) and all(isinstance(best.get(key), kind) for key, kind in kinds.items())
    return best if whole else None


def best_folder(given: Path) -> Path | None:
    """Returns the checkpoint that RUN/best stands for; None if the path is another or none is recorded."""
    if given.name != BEST_NAME or os.path.exists(given):
        return None
    checkpoints = given.parent / CHECKPOINTS
    best = read_best(checkpoints)
    folder = best and checkpoints / folder_name(best["step"])
    return folder if folder and folder.is_dir() else None


WEIGHTS = "model.pt"
"""Name of the weights file, a plain state dict: `open_clip.create_model(name, pretrained=PATH)` and
`torch.load(weights_only=True)` load it. With LoRA it has adapters beside the weights, and an export adds them
up."""
EMA_WEIGHTS = "ema.pt"
"""Name of the file with the moving average of the weights, in the same format, where `optim.ema_decay` is
set."""
MANIFEST = "manifest.json"
MODEL_CONFIG = "model.json"
"""Name of the model's config in a checkpoint, in open_clip's format. The tokenizer of a text tower of Hugging
Face's and the tower's config.json lie beside it."""
TEXT_CONFIG = "config.json"
"""Name of the config of a text tower of Hugging Face's in a checkpoint: its folder then serves as
`model.text`."""
_OPEN_CLIP_PARAMETERS = "params.txt"
_TOLD = re.compile(rb'"checkpoint": "step-(\d+)"')
_HUB = ("hf-hub:", "local-dir:")


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, from Clipship or from elsewhere."""

    model: str | None
    """Name or config file of the model; None if no file beside the weights names it."""
    pretrained: str | None
    """Weights file or open_clip's tag; None if the model's name implies its weights."""
    job: Mapping[str, Any] | None = None
    """Job of the run that trained the model; None if it was not trained by Clipship."""


def find_trained(given: str) -> TrainedModel:
    """Returns the model that `given` names.

    `given` is a run folder (its newest checkpoint is taken), RUN/best, a checkpoint folder, a weights file,
    `MODEL:TAG` or a hub's name. Raises InputError if it is none of these.
    """
    path = Path(given).expanduser()
    path = best_folder(path) or path
    # os.path takes any text for a name, also one that no file system can have.
    if os.path.isdir(path):
        return _from_run(_newest(path))
    if os.path.isfile(path):
        is_ours = path.name in (WEIGHTS, EMA_WEIGHTS) and (path.parent / MANIFEST).is_file()
        return _from_run(path.parent, path.name) if is_ours else _from_open_clip(path)
    if given.startswith(_HUB):
        return TrainedModel(given, None)
    model, colon, tag = given.partition(":")
    if colon and model and tag:
        return TrainedModel(model, tag)
    raise InputError(
        f"{given}: no such file or folder: give a run folder, RUN/best where checkpoint.best is set, a "
        "checkpoint folder (runs/NAME/checkpoints/step-...), a weights file, or a model and tag of open_clip "
        f"such as ViT-B-32:laion2b_s34b_b79k{run_hint(given)}"
    )


def checkpoint_folder(given: str) -> Path:
    """Returns the checkpoint that a run folder or RUN/best stands for; another path unchanged."""
    path = Path(given)
    if os.path.isdir(path) and not os.path.isfile(path / MANIFEST):
        return next(reversed(complete_checkpoints(path / CHECKPOINTS).values()), path)
    return best_folder(path) or path


def run_of_weights(weights: str | None) -> tuple[Path, int] | None:
    """Returns the run folder and the step of a weights file of Clipship; None for other weights.

    A checkpoint that was copied out of its run folder belongs to none.
    """
    checkpoint = Path(weights or "").parent
    folder, step = checkpoint.parent.parent, step_of(checkpoint.name)
    in_a_run = checkpoint.parent.name == CHECKPOINTS and (folder / JOB_FILE).is_file()
    return (folder, step) if in_a_run and step is not None else None


def check_resume(wanted: str, checkpoints: Path | None) -> None:
    """Raises InputError if `checkpoint.resume` names a path and nothing is there.

    `checkpoints` is the run's own checkpoint folder, None for a run that begins anew. If its newest readable
    checkpoint comes from a start with the same path, that path is no longer needed and may be gone.
    """
    if (
        wanted not in ("auto", "never")
        and not os.path.exists(wanted)
        and not _resumed_from(wanted, checkpoints)
    ):
        raise InputError(
            f"checkpoint.resume: there is no checkpoint at {wanted}; give a checkpoint folder, a file of "
            "open_clip_train, auto or never"
        )


def check_no_file(wanted: str) -> None:
    """Raises InputError if a job with stages goes on from a file of open_clip_train, which knows none."""
    if os.path.isfile(wanted):
        raise InputError(
            f"checkpoint.resume = {wanted}: a file of open_clip_train knows no [[stage]]: "
            "name its weights in model.pretrained, or leave the stages out"
        )


def _resumed_from(wanted: str, checkpoints: Path | None) -> bool:
    for folder in reversed((complete_checkpoints(checkpoints) if checkpoints else {}).values()):
        # a broken checkpoint is passed over, as the start itself does
        with suppress(OSError, ValueError, KeyError, TypeError):
            return bool(
                read_json(folder / MANIFEST, links=True)["job"]["checkpoint"]["resume"] == masked(wanted)
            )
    return False


def open_clip_parameters(checkpoint: Path) -> dict[str, str]:
    """Returns the parameters of the run that wrote a checkpoint of open_clip_train, without any empty ones.

    open_clip_train writes params.txt, with lines such as `model: NAME`, above its folder of checkpoints;
    nothing is returned where it is gone.
    """
    parameters = checkpoint.absolute().parent.parent / _OPEN_CLIP_PARAMETERS
    text = read_plain(parameters, errors="replace", links=True) if parameters.is_file() else ""
    pairs = [(name, value.strip()) for name, _, value in (line.partition(": ") for line in text.splitlines())]
    return {name: value for name, value in reversed(pairs) if value}


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Returns the checkpoint folders in `folder` that have a manifest by their steps, oldest first.

    The manifest is written last, so each of them is complete.
    """
    return {step: part for step, part in step_folders(folder).items() if (part / MANIFEST).is_file()}


def newest_whole(folder: Path) -> tuple[int, Path] | None:
    """Returns the step of the newest checkpoint in `folder` whose manifest can be read, and its folder.

    A run goes on there. Its metrics may not name it yet: it is recorded a step after it was written.
    """
    for step, checkpoint in reversed(complete_checkpoints(folder).items()):
        with suppress(OSError, ValueError):
            if isinstance(read_json(checkpoint / MANIFEST, links=True), dict):
                return step, checkpoint
    return None


def goes_on_from(wanted: str, checkpoints: Path) -> Path | None:
    """Returns where a run with `checkpoint.resume = wanted` goes on, by names alone; None if it begins."""
    if wanted not in ("auto", "never") and not _resumed_from(wanted, checkpoints):
        return Path(wanted)
    newest = newest_whole(checkpoints)
    return newest[1] if newest else None


def newest_step(folder: Path) -> int:
    """Returns the step of the newest complete checkpoint in `folder`; 0 if there is none."""
    return max(complete_checkpoints(folder), default=0)


def saved_step(metrics: Path) -> int:
    """Returns the step of the last checkpoint that metrics.jsonl tells of, there or not; 0 for none."""
    with suppress(OSError):
        for _, line in lines_from_end(metrics):
            if told := _TOLD.search(line):
                return int(told[1])
    return 0


def _newest(folder: Path) -> Path:
    if (folder / MANIFEST).is_file():
        return folder
    checkpoints = complete_checkpoints(folder) or complete_checkpoints(folder / CHECKPOINTS)
    if not checkpoints:
        raise InputError(
            f"{folder} is not a checkpoint and contains none: give a run folder, or a folder with {MANIFEST} "
            f"and {WEIGHTS}"
        )
    return checkpoints[max(checkpoints)]


def _from_run(folder: Path, weights: str = WEIGHTS) -> TrainedModel:
    try:
        job = read_json(folder / MANIFEST, links=True)["job"]
        if (folder / TEXT_CONFIG).is_file():
            job = {**job, "model": {**job["model"], "text": str(folder.absolute())}}
        return TrainedModel(_name(job["model"]["name"], folder), str((folder / weights).absolute()), job)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InputError(
            f"{folder}: its {MANIFEST} cannot be read ({type(problem).__name__}: {problem}): give "
            f"the path of {WEIGHTS} instead"
        ) from None


def _name(name: str, folder: Path) -> str:
    """Returns the model's name, or the copy of its config in a checkpoint if the config file is gone."""
    own = folder.absolute() / MODEL_CONFIG
    return str(own) if name.endswith(".json") and not Path(name).is_file() and own.is_file() else name


def _from_open_clip(weights: Path) -> TrainedModel:
    """Returns the model of a weights file of open_clip_train."""
    return TrainedModel(open_clip_parameters(weights).get("model"), str(weights.absolute()))
