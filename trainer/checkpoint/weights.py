"""Checks a weights file before a model is made of it: is it complete, and which loss was it trained with?"""

import hashlib
import pickle
import re
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open

from trainer.checkpoint.weights_kind import check_kind
from trainer.comm.protocol import Comm
from trainer.comm.rank_zero import of_rank_0
from trainer.config import Job
from trainer.config.losses import LOSSES
from trainer.errors import InputError
from trainer.run.checkpoints import EMA_WEIGHTS, MANIFEST, WEIGHTS
from trainer.safe_io.plain import read_json

_NUMPY = (".npz", ".npy")
_BIAS = "logit_bias"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OFFERS_CODE = ("weights_only", "trust_remote_code", "only if you trust")


def with_loss_of_weights(job: Job, comm: Comm) -> Job:
    """Collective: returns the job with the loss that its weights file was trained with.

    The models of the two losses differ in one parameter. Raises InputError on every rank if the file is
    damaged or holds no weights. Tags and hub names are left to open_clip.
    """
    return _with_loss(job, of_rank_0(comm, lambda: _has_bias(job)))


def with_loss_alone(job: Job) -> Job:
    """Does what `with_loss_of_weights` does, in a process that has no ranks beside it."""
    return _with_loss(job, _has_bias(job))


def _has_bias(job: Job) -> bool | None:
    path = Path(job.model.pretrained or "")
    return has_bias(path) if path.is_file() else None


def _with_loss(job: Job, siglip: bool | None) -> Job:
    if siglip is None or LOSSES[job.optim.loss].has_bias == siglip:
        return job
    loss = "siglip" if siglip else "clip"
    return job.model_copy(update={"optim": job.optim.model_copy(update={"loss": loss})})


def has_bias(path: Path) -> bool:
    """Returns what `holds_bias` does. Raises InputError, too, for weights that differ from their seal."""
    _check_seal(path)
    return holds_bias(path)


def holds_bias(path: Path) -> bool:
    """Returns whether the file's model was trained with the siglip loss.

    Raises InputError if it holds no weights.
    """
    return any(name.rpartition(".")[2] == _BIAS for name in _names(path))


def _check_seal(path: Path) -> None:
    """Raises InputError if a checkpoint's weights differ from the checksum in its manifest.

    torch loads flipped bits without an error.
    """
    manifest = path.parent / MANIFEST
    if path.name not in (WEIGHTS, EMA_WEIGHTS) or not manifest.is_file():
        return
    try:
        sealed = read_json(manifest, links=True)["files"][path.name]["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path}: the {MANIFEST} beside it has no checksum for it ({cause(error)}): "
            "choose another checkpoint"
        ) from None
    about = path.stat()
    if _digest(path, about.st_size, about.st_mtime_ns) != sealed:
        raise InputError(
            f"{path}: its checksum differs from that in {MANIFEST}: choose another checkpoint of the run"
        )


@cache
def _digest(path: Path, _size: int, _changed_ns: int) -> str:
    """A process asks before it knows the loss of weights, and again where it builds their model."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _names(path: Path) -> list[str]:
    """Returns the tensors' names; runs no code from the file.

    It reads no values if the format allows that.
    """
    check_kind(path)
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        if path.suffix in _NUMPY:
            return [_BIAS]  # of big_vision's SigLIP, the only models in this format
        content = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # damaged bytes can make the readers raise anything
        raise InputError(
            f"{path} holds no weights that can be read safely ({cause(error)}): "
            "give a file that holds tensors by name"
        ) from None
    tensors = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or not _has_tensors(tensors):
        parts = content.items() if isinstance(content, dict) else ()
        inside = [name for name, part in parts if _has_tensors(part)]
        more = f"; {inside[0]!r:.80} in it does: save that part as a file of its own" if inside else ""
        raise InputError(
            f"{path} holds no weights (it is a {type(content).__name__} without tensors): "
            f"give a file that holds tensors by name, at its top or under 'state_dict'{more}"
        )
    return [str(name) for name in tensors]


def _has_tensors(part: object) -> bool:
    return isinstance(part, dict) and any(isinstance(value, torch.Tensor) for value in part.values())


def cause(error: Exception) -> str:
    """Returns the error's text in one line, without colours and torch's advice to run a file's code."""
    if isinstance(error, pickle.UnpicklingError) or any(offer in str(error) for offer in _OFFERS_CODE):
        return "it is damaged, or contains Python code besides tensors"
    if isinstance(error, EOFError):
        return "it is empty, or ends too early"
    lines = _COLOURS.sub("", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
