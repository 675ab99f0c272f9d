"""Keeps the features of class names between evaluations of the same weights, in the run folder.

A file has one array. Its name is a checksum of all that the features depend on: model, weights, precision,
device, templates and class names. A file that cannot be read counts as none.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.evaluate.features import evaluating
from trainer.evaluate.rounds import Rounds
from trainer.evaluate.zero_shot import class_features
from trainer.model.build import Clip
from trainer.run.model_identity import model_identity
from trainer.safe_io.atomic import replacing
from trainer.safe_io.plain import open_plain

log = logging.getLogger("clipship")

FORMAT = 1
"""Number that changes with the way in which features are computed or kept."""
MOST_FILES = 256
"""Files that the folder keeps; the oldest ones are removed."""


def kept_class_features(
    clip: Clip,
    names: Sequence[str],
    templates: Sequence[str],
    job: Job,
    folder: Path | None,
    rounds: Rounds,
) -> Tensor:
    """Collective: returns what `class_features` does, from `folder` if it is there, else keeps it there.

    Only rank 0 reads and writes. Without a folder, nothing is kept.
    """
    comm = rounds.comm
    reads = folder is not None and comm.world.rank == 0
    file = folder / _name(job, comm, names, templates) if folder is not None and reads else None
    kept = _read(file, len(names)) if file else None
    width = int(comm.all_reduce(torch.tensor(0 if kept is None else kept.shape[1], device=comm.device)))
    if width:
        rows = torch.zeros(len(names), width, device=comm.device)
        return comm.all_reduce(rows if kept is None else kept.to(comm.device))
    with evaluating(clip.model):
        classes_CD = class_features(clip, names, templates, job.model.precision, rounds)
    if file:
        _write(file, classes_CD)
    return classes_CD


def _name(job: Job, comm: Comm, names: Sequence[str], templates: Sequence[str]) -> str:
    identity = [FORMAT, *model_identity(job), comm.device.type]
    text = json.dumps([*identity, list(templates), list(names)])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npy"


def _read(file: Path, classes: int) -> Tensor | None:
    try:
        with open(file, "rb", opener=open_plain) as content:
            rows = np.load(content, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    right = rows.dtype == np.float32 and rows.ndim == 2 and len(rows) == classes and rows.shape[1] > 0
    return torch.from_numpy(rows) if right else None


def _write(file: Path, classes_CD: Tensor) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as content:
            np.save(content, classes_CD.cpu().numpy())
    except OSError as error:  # a full disk ends no evaluation
        log.warning("%-12s the features of the class names are NOT KEPT: %s", "suite", error)
        return
    kept = sorted(file.parent.glob("*.npy"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in kept[MOST_FILES:]:
        with suppress(OSError):
            old.unlink()
