"""Checkpoint folders on disk: `step-0000NNNN` is whole or not there, and says itself whether a bit has changed. No torch.

A folder is filled beside its place, its files are flushed and sealed with size and SHA-256, and it is renamed when all parts are there.
What a kill leaves behind begins with a dot and is swept away at the next start.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from trainer.inputs.checkpoints import MANIFEST as MANIFEST
from trainer.inputs.checkpoints import WEIGHTS as WEIGHTS
from trainer.whole_file import write_json, write_whole

BEST = "best.json"
_POLL_S = 0.05
_FAILED = ".failed"
_ASIDE = "aside-"


class BrokenCheckpoint(Exception):
    """A folder that is not what its manifest says; the text names the part."""


def folder_name(step: int) -> str:
    """Of a checkpoint; names sort as steps do."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Folder:
    """The checkpoint of one step within `checkpoints`, before and after it has its name."""

    checkpoints: Path
    step: int

    @property
    def place(self) -> Path:
        return self.checkpoints / folder_name(self.step)

    @property
    def beside(self) -> Path:
        return self.checkpoints / f".{self.place.name}.partial"

    def write(self, name: str, content: Callable[[Path], None]) -> None:
        """Let `content` write one file of the folder, and seal it. Several ranks may write different files at once."""
        self.beside.mkdir(parents=True, exist_ok=True)
        content(self.beside / name)
        write_json(self.beside / f"{name}.seal", _sealed(self.beside / name))

    def publish(self, names: list[str], about: Mapping[str, Any], timeout_s: float) -> Path:
        """Wait for the seals of all files, write the manifest, rename.

        Raises OSError with what a rank told of its part, TimeoutError naming the files that no rank has written.
        """
        seals = {name: self.beside / f"{name}.seal" for name in names}
        limit = time.monotonic() + timeout_s
        while missing := [name for name, seal in seals.items() if not seal.exists()]:
            for told in self.beside.glob(f"*{_FAILED}"):
                raise OSError(f"checkpoint of step {self.step}: {told.read_text()}")
            if time.monotonic() > limit:
                raise TimeoutError(f"checkpoint of step {self.step}: not written within {timeout_s:g} s: {', '.join(missing)}")
            time.sleep(_POLL_S)
        parts = {name: json.loads(seal.read_text()) for name, seal in seals.items()}
        for seal in seals.values():
            seal.unlink()
        write_json(self.beside / MANIFEST, {**about, "step": self.step, "files": parts})
        _flush_names(self.beside)
        remove(self.place)
        os.rename(self.beside, self.place)
        _flush_names(self.checkpoints)
        return self.place

    def note_metrics(self, metrics: Mapping[str, float | int]) -> None:
        """Into the manifest of the checkpoint that has its name: they were measured since."""
        manifest = json.loads((self.place / MANIFEST).read_text())
        write_json(self.place / MANIFEST, {**manifest, "metrics": dict(metrics)})

    def tell_failure(self, rank: int, error: Exception) -> None:
        """Of this rank's part: rank 0 need not wait for it. On a disk that takes not even that, it does."""
        with suppress(OSError):
            write_whole(self.beside / f"rank-{rank}{_FAILED}", f"rank {rank}: {error}")


def verified(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written. Raises BrokenCheckpoint naming the part that is not."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        parts = manifest["files"].items()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BrokenCheckpoint(f"{folder}: its {MANIFEST} cannot be read: {error}") from error
    for name, seal in parts:
        path = folder / name
        if not path.is_file():
            raise BrokenCheckpoint(f"{folder}: {name} is missing")
        if path.stat().st_size != seal["bytes"]:
            raise BrokenCheckpoint(f"{folder}: {name} has {path.stat().st_size} bytes of {seal['bytes']}")
        if _sealed(path) != seal:
            raise BrokenCheckpoint(f"{folder}: {name} does not have the checksum it was written with")
    return manifest


def newest_first(checkpoints: Path) -> Iterator[Path]:
    """The folders that have their name, whole or broken."""
    return iter(sorted(checkpoints.glob("step-*"), reverse=True))


def newest(checkpoints: Path) -> Path:
    """The folder of the latest step. Raises FileNotFoundError where there is none."""
    for folder in newest_first(checkpoints):
        return folder
    raise FileNotFoundError(f"no checkpoint in {checkpoints}")


def sweep(checkpoints: Path) -> None:
    """Remove what a killed run left half written or half removed."""
    for leftover in checkpoints.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def set_aside(checkpoints: Path, step: int) -> list[Path]:
    """Take the folders of later steps out of the way of a run that goes on from this one: they are another run's by now, or broken.

    So is the best one, where it is one of them.
    """
    later = [folder for folder in newest_first(checkpoints) if folder.name > folder_name(step)]
    best = _noted(checkpoints)
    if best is not None and best["step"] > step:
        (checkpoints / BEST).unlink()
    return [folder.rename(_free_name(folder.with_name(f"{_ASIDE}{folder.name}"))) for folder in later]


def _free_name(wanted: Path) -> Path:
    names = (wanted if not number else wanted.with_name(f"{wanted.name}-{number}") for number in count())
    return next(name for name in names if not name.exists())


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the last `keep` and the best one."""
    best = best_so_far(checkpoints)
    for folder in list(newest_first(checkpoints))[keep:]:
        if best is None or folder.name != folder_name(best["step"]):
            remove(folder)


def best_so_far(checkpoints: Path) -> dict[str, Any] | None:
    """The step, metric and value that `note_best` noted last, where the checkpoint of that step is there."""
    best = _noted(checkpoints)
    return best if best is not None and Folder(checkpoints, best["step"]).place.is_dir() else None


def _noted(checkpoints: Path) -> dict[str, Any] | None:
    path = checkpoints / BEST
    return json.loads(path.read_text()) if path.exists() else None


def note_best(checkpoints: Path, step: int, metric: str, value: float) -> None:
    """From now on the checkpoint of this step is kept."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    write_json(checkpoints / BEST, {"step": step, "metric": metric, "value": value})


def remove(folder: Path) -> None:
    """Take the name away first: a kill in between leaves no half of a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def _sealed(path: Path) -> dict[str, Any]:
    """Flush a file to its disk; its size and checksum."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush_names(folder: Path) -> None:
    """A rename survives a power cut only when its folder is flushed too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
