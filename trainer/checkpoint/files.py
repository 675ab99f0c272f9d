"""Checkpoint folders on disk: `step-0000NNNN` is complete or absent, and checksums show a changed bit.

Imports no torch. A folder is filled beside its final place. Its files are flushed and sealed with size and
SHA-256, and it is renamed when all parts are there; where folders cannot be renamed, its manifest comes last.
Leftovers of a kill begin with a dot and are removed at the next start. Folders of other names, such as copies
that a user keeps, are neither read nor touched.
"""

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from trainer.run.checkpoints import BEST, folder_name, read_best, step_folders
from trainer.run.checkpoints import EMA_WEIGHTS as EMA_WEIGHTS
from trainer.run.checkpoints import MANIFEST as MANIFEST
from trainer.run.checkpoints import WEIGHTS as WEIGHTS
from trainer.run.retry import every, until
from trainer.safe_io.atomic import write_json, write_whole
from trainer.safe_io.folders import flush_folder, move_folder
from trainer.safe_io.plain import read_json, read_plain
from trainer.text.wording import many

log = logging.getLogger("clipship")

_POLL_S = 0.05
_FAILED = ".failed"
_ASIDE = "aside-"
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(partial|removed(-\d+)?)")
_told: set[Path] = set()
"""Folders that cannot be removed, of which this process has warned."""


class BrokenCheckpoint(Exception):
    """Raised for a folder that differs from its manifest; the text names the part."""


@dataclass(frozen=True)
class Folder:
    """The checkpoint of one step within `checkpoints`, before and after it has its final name."""

    checkpoints: Path
    step: int

    @property
    def final(self) -> Path:
        return self.checkpoints / folder_name(self.step)

    @property
    def partial(self) -> Path:
        return self.checkpoints / f".{self.final.name}.partial"

    def write(self, name: str, content: Callable[[Path], None]) -> None:
        """Lets `content` write one file of the folder, and seals it.

        Several ranks may write different files at once.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        content(self.partial / name)
        write_json(self.partial / f"{name}.seal", _sealed(self.partial / name))

    def publish(self, names: list[str], about: Mapping[str, Any], timeout_s: float) -> Path:
        """Waits for the seals of all files, writes the manifest, and renames the folder; returns it.

        Raises OSError with the failure that a rank reported for its part, and TimeoutError, which names the
        missing files, after `timeout_s` seconds.
        """
        seals = {name: self.partial / f"{name}.seal" for name in names}

        def missing() -> list[str]:
            left = [name for name, seal in seals.items() if not seal.exists()]
            for failure in self.partial.glob(f"*{_FAILED}") if left else ():
                raise OSError(f"checkpoint of step {self.step}: {read_plain(failure)}")
            return left

        if not until(lambda: not missing(), every(_POLL_S, timeout_s)):
            raise TimeoutError(
                f"checkpoint of step {self.step}: these files were not written within {timeout_s:g} s: "
                f"{', '.join(missing())}"
            )
        parts = {name: read_json(seal) for name, seal in seals.items()}
        for seal in seals.values():
            seal.unlink()
        write_json(self.partial / MANIFEST, {**about, "step": self.step, "files": parts})
        flush_folder(self.partial)
        remove(self.final)
        move_folder(self.partial, self.final, last=MANIFEST)
        flush_folder(self.checkpoints)
        return self.final

    def record_metrics(self, metrics: Mapping[str, float | int]) -> None:
        """Adds metrics that were measured later to the manifest of a checkpoint that has its final name."""
        manifest = read_json(self.final / MANIFEST, links=True)
        write_json(self.final / MANIFEST, {**manifest, "metrics": dict(metrics)})

    def mark_failed(self, rank: int, error: Exception) -> None:
        """Marks this rank's part as failed, so that rank 0 stops waiting for it.

        If the disk is too full for the marker, rank 0 waits until its time limit.
        """
        with suppress(OSError):
            write_whole(self.partial / f"rank-{rank}{_FAILED}", f"rank {rank}: {error}")


def verify(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose every file is as it was written.

    Raises BrokenCheckpoint, which names the first part that is not.
    """
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST, links=True)
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{folder}: its {MANIFEST} cannot be read: {error}") from error
    require(folder, manifest, {"step": int, "files": dict})
    for name, seal in manifest["files"].items():
        path = folder / name
        if not (isinstance(seal, dict) and {"bytes", "sha256"} <= seal.keys() and path.name == name):
            raise BrokenCheckpoint(f"{folder}: its {MANIFEST} has no size and checksum for {name}")
        if not path.is_file():
            raise BrokenCheckpoint(f"{folder}: {name} is missing")
        if path.stat().st_size != seal["bytes"]:
            raise BrokenCheckpoint(
                f"{folder}: {name} has {many(path.stat().st_size, 'byte')} instead of {seal['bytes']}"
            )
        if _sealed(path) != seal:
            raise BrokenCheckpoint(f"{folder}: the checksum of {name} differs from that in its {MANIFEST}")
    return manifest


def require(folder: Path | str, manifest: object, kinds: Mapping[str, type]) -> None:
    """Raises BrokenCheckpoint if the manifest lacks one of the keys, or if its value is of another type."""
    values = manifest if isinstance(manifest, dict) else {}
    lacking = [key for key, kind in kinds.items() if not isinstance(values.get(key), kind)]
    if lacking:
        raise BrokenCheckpoint(f"{folder}: its {MANIFEST} is malformed: it has no valid {', '.join(lacking)}")


def newest_first(checkpoints: Path) -> Iterator[Path]:
    """Yields the folders with a final name, from the latest step on, complete or broken."""
    return reversed(step_folders(checkpoints).values())


def newest(checkpoints: Path) -> Path:
    """Returns the folder of the latest step. Raises FileNotFoundError if there is none."""
    for folder in newest_first(checkpoints):
        return folder
    raise FileNotFoundError(f"no checkpoint in {checkpoints}")


def is_step(folder: Path, checkpoints: Path, step: int) -> bool:
    """Returns whether the folder, by whatever path, is the checkpoint of a step in `checkpoints`."""
    own = checkpoints / folder_name(step)
    return own.exists() and own.samefile(folder)


def saved_ago_s(checkpoints: Path) -> float:
    """Returns the seconds since the newest complete checkpoint was published; 0 if there is none."""
    for folder in newest_first(checkpoints):
        with suppress(OSError):
            return max(0.0, time.time() - (folder / MANIFEST).stat().st_mtime)
    return 0.0


def remove_leftovers(checkpoints: Path) -> None:
    """Removes folders that a killed run left half written or half removed."""
    for leftover in checkpoints.glob(".step-*"):
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)


def set_aside(checkpoints: Path, step: int) -> list[Path]:
    """Renames the folders of later steps, so that a run can continue from this one; returns the new paths.

    They belong to another run by now, or are broken. If the best checkpoint is one of them, it is no longer
    marked as best.
    """
    later = [folder for number, folder in step_folders(checkpoints).items() if number > step]
    best = read_best(checkpoints)
    if best is not None and best["step"] > step:
        (checkpoints / BEST).unlink()
    return [
        move_folder(folder, _free_name(folder.with_name(f"{_ASIDE}{folder.name}")), first=MANIFEST)
        for folder in later
    ]


def _free_name(wanted: Path) -> Path:
    names = (wanted if not number else wanted.with_name(f"{wanted.name}-{number}") for number in count())
    return next(name for name in names if not name.exists())


def prune(checkpoints: Path, keep: int, held: Collection[str] = ()) -> None:
    """Removes all checkpoints but the last `keep`, the best one, and those that are held by their names.

    One that cannot be removed is told once, and stays.
    """
    best = best_so_far(checkpoints)
    kept = {*held, *([folder_name(best["step"])] if best is not None else [])}
    for folder in list(newest_first(checkpoints))[keep:]:
        if folder.name not in kept:
            try:
                remove(folder)
            except OSError as error:
                _tell_left(folder, error)


def best_so_far(checkpoints: Path) -> dict[str, Any] | None:
    """Returns the step, metric and value of the best checkpoint; None if none is recorded or it is gone."""
    best = read_best(checkpoints)
    return best if best is not None and Folder(checkpoints, best["step"]).final.is_dir() else None


def record_best(checkpoints: Path, step: int, metric: str, value: float) -> None:
    """Marks the checkpoint of this step as the best, which is kept from now on."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    write_json(checkpoints / BEST, {"step": step, "metric": metric, "value": value})


def remove(folder: Path) -> None:
    """Removes a checkpoint; it is renamed first, so that a kill in between leaves no half of a checkpoint.

    What cannot be removed then is told. Raises OSError if it cannot be renamed.
    """
    if folder.exists():
        doomed = _free_name(folder.with_name(f".{folder.name}.removed"))
        move_folder(folder, doomed, first=MANIFEST)
        try:
            shutil.rmtree(doomed)
        except OSError as error:
            shutil.rmtree(doomed, ignore_errors=True)  # the rest of it
            _tell_left(doomed, error)


def _tell_left(folder: Path, error: OSError) -> None:
    """Warns once of a folder that was to be removed and stays, which harms no run."""
    if folder not in _told:
        _told.add(folder)
        log.warning(
            "checkpoint   %s is not needed any more and cannot be removed: %s. The run goes on; remove it "
            "yourself to free its room.",
            folder,
            error,
        )


def _sealed(path: Path) -> dict[str, Any]:
    """Flushes a file to its disk; returns its size and checksum."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
