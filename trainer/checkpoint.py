"""Checkpoints: a folder a step, written beside, flushed, renamed, so that one that has its name is whole."""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.run import write_json

WEIGHTS = "model.pt"
"""A plain state dict: `open_clip.create_model(name, pretrained=PATH)` loads it, and so does `torch.load(weights_only=True)`."""
MANIFEST = "manifest.json"


def save(checkpoints: Path, step: int, model: nn.Module, about: Mapping[str, Any]) -> Path:
    """Not collective: write `checkpoints/step-0000NNNN` whole or not at all; returns its path. `about` goes into the manifest."""
    folder = checkpoints / f"step-{step:08d}"
    beside = checkpoints / f".step-{step:08d}.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    torch.save(weights, beside / WEIGHTS)
    write_json(beside / MANIFEST, {**about, "step": step, "files": {WEIGHTS: _seal(beside / WEIGHTS)}})
    _publish(beside, folder)
    return folder


def newest(checkpoints: Path) -> Path:
    """The folder of the latest step. Raises FileNotFoundError where there is none."""
    folders = sorted(checkpoints.glob("step-*"))
    if not folders:
        raise FileNotFoundError(f"no checkpoint in {checkpoints}")
    return folders[-1]


def _seal(path: Path) -> dict[str, Any]:
    """Flush a file to its disk; its size and checksum."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _publish(beside: Path, folder: Path) -> None:
    _flush_names(beside)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(beside, folder)
    _flush_names(folder.parent)


def _flush_names(folder: Path) -> None:
    """A rename survives a power cut only when its folder is flushed too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
