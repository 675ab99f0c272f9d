"""From what a user calls a checkpoint to a model and its weights. Looks at names and manifests, opens no weights; imports no torch."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import InputError

WEIGHTS = "model.pt"
"""A plain state dict: `open_clip.create_model(name, pretrained=PATH)` loads it, and so does `torch.load(weights_only=True)`."""
MANIFEST = "manifest.json"
_THEIR_PARAMETERS = "params.txt"
_HUB = ("hf-hub:", "local-dir:")


@dataclass(frozen=True)
class Trained:
    """A model that was trained, by us or by others."""

    model: str | None
    """Name or config file; None where nothing beside the weights says it."""
    pretrained: str | None
    """Weights file or open_clip's tag; None where the model's name brings its weights."""
    job: Mapping[str, Any] | None = None
    """Of the run that made it, if it was ours."""


def find_trained(given: str) -> Trained:
    """What `given` names: a run folder (its newest checkpoint), a checkpoint folder, a weights file, `MODEL:TAG` or a hub's name.

    Raises InputError where it names none of these.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        return _ours(_newest(path))
    if path.is_file():
        return _ours(path.parent) if path.name == WEIGHTS and (path.parent / MANIFEST).is_file() else _theirs(path)
    if given.startswith(_HUB):
        return Trained(given, None)
    model, colon, tag = given.partition(":")
    if colon and model and tag:
        return Trained(model, tag)
    raise InputError(
        f"{given}: no such file or folder: give a run folder, a checkpoint folder (runs/NAME/checkpoints/step-...), a weights file, "
        "or a model and tag of open_clip such as ViT-B-32:laion2b_s34b_b79k"
    )


def check_resume(wanted: str, checkpoints: Path | None) -> None:
    """Raises InputError where `checkpoint.resume` names a path and nothing is there.

    A run that went on from there needs it no more, once it has a checkpoint of its own in `checkpoints`: it may have been removed since.
    None: the run begins anew.
    """
    if wanted not in ("auto", "never") and not os.path.exists(wanted) and not _went_on(wanted, checkpoints):
        raise InputError(
            f"checkpoint.resume: there is no checkpoint at {wanted}; it is a folder, or a file of open_clip_train, or auto, or never"
        )


def _went_on(wanted: str, checkpoints: Path | None) -> bool:
    for folder in reversed(whole_in(checkpoints) if checkpoints else []):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a broken one is passed over, as at the start itself
            return bool(json.loads((folder / MANIFEST).read_text())["job"]["checkpoint"]["resume"] == wanted)
    return False


def whole_in(folder: Path) -> list[Path]:
    """Its checkpoint folders that have a manifest, which is written last; the newest last."""
    return sorted(part for part in folder.glob("step-*") if (part / MANIFEST).is_file())


def _newest(folder: Path) -> Path:
    if (folder / MANIFEST).is_file():
        return folder
    found = whole_in(folder) or whole_in(folder / "checkpoints")
    if not found:
        raise InputError(f"{folder} is no checkpoint and holds none: give a run folder, or a folder with {MANIFEST} and {WEIGHTS}")
    return found[-1]


def _ours(folder: Path) -> Trained:
    try:
        job = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["job"]
        return Trained(job["model"]["name"], str((folder / WEIGHTS).absolute()), job)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{folder}: its {MANIFEST} cannot be read ({type(problem).__name__}: {problem}): give {WEIGHTS} alone") from None


def _theirs(weights: Path) -> Trained:
    """open_clip_train leaves params.txt, with a line `model: NAME`, above its folder of checkpoints."""
    parameters = weights.absolute().parent.parent / _THEIR_PARAMETERS
    lines = parameters.read_text(encoding="utf-8", errors="replace").splitlines() if parameters.is_file() else []
    names = [line.partition(": ")[2].strip() for line in lines if line.startswith("model: ")]
    return Trained(names[0] if names else None, str(weights.absolute()))
