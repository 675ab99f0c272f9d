"""Looks into a weights file before a model is made of it: is it whole, and what kind of model is it of?"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open

from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.inputs.checkpoints import MANIFEST
from trainer.job import Job

_NUMPY = (".npz", ".npy")
_BIAS = "logit_bias"


def with_loss_of_weights(job: Job, comm: Comm) -> Job:
    """Collective: the job with the loss that its weights file was trained by, for the models of the two losses differ in a parameter.

    Raises InputError on every rank where the file is damaged, or holds no weights. Tags and hub names are left to open_clip.
    """
    path = Path(job.model.pretrained or "")
    found: bool | str | None = None
    if comm.world.rank == 0 and path.is_file():
        try:
            found = _has_bias(path)
        except InputError as problem:
            found = str(problem)
    found = comm.broadcast_object(found)
    if isinstance(found, str):
        raise InputError(found)
    if found is None:
        return job
    return job.model_copy(update={"optim": job.optim.model_copy(update={"loss": "siglip" if found else "clip"})})


def _has_bias(path: Path) -> bool:
    _check_seal(path)
    return holds_bias(path)


def holds_bias(path: Path) -> bool:
    """Is the file's model of the siglip loss? Raises InputError where it holds no weights."""
    return any(name.removeprefix("module.") == _BIAS for name in _names(path))


def _check_seal(path: Path) -> None:
    """A checkpoint of ours says the checksum of its weights; torch loads flipped bits without a word."""
    manifest = path.parent / MANIFEST
    if not manifest.is_file():
        return
    seal = json.loads(manifest.read_text(encoding="utf-8"))["files"].get(path.name)
    with path.open("rb") as file:
        if seal and hashlib.file_digest(file, "sha256").hexdigest() != seal["sha256"]:
            raise InputError(f"{path} does not have the checksum it was written with: take another checkpoint of the run")


def _names(path: Path) -> list[str]:
    """Reads no values where the format allows it, and runs no code that the file brings."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        if path.suffix in _NUMPY:
            return [_BIAS]  # big_vision's SigLIP: the only models that come so
        content = torch.load(path, map_location="meta", weights_only=True)
        return list(content.get("state_dict", content))
    except Exception as error:  # the readers raise whatever the bytes lead them to
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no more is known'}"
        raise InputError(f"{path} holds no weights that can be read safely ({what}): give a file of tensors by name") from None
