"""A run's copy in object storage or another folder: what it holds, how it is written and fetched. No torch.

It has the layout of a run folder, `ADDRESS/checkpoints/step-...`, with the files that a new machine needs to
go on. A checkpoint's manifest is written last and removed first, so that half a copy is never taken for one.
"""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import BrokenCheckpoint, verify
from trainer.config import Job
from trainer.config.loader import dump_without_secrets
from trainer.data.store import Seal, get, names, put, read, remove
from trainer.errors import InputError, StorageError
from trainer.run.checkpoints import BEST, MANIFEST, folder_name, step_of
from trainer.run.layout import (
    CHECKPOINTS,
    COPY_FILE,
    ENVIRONMENT_FILE,
    GOODPUT_FILE,
    JOB_FILE,
    METRICS_FILE,
    SERVICE_ID_FILES,
    START_FILE,
)
from trainer.safe_io.atomic import json_text
from trainer.safe_io.folders import whole_folder
from trainer.safe_io.plain import MOST_LINES_BYTES, parse_json, read_json, read_part, read_plain

log = logging.getLogger("clipship")
Progress = Callable[[int, int], None]
"""Function that gets the bytes so far and of all."""

_AS_THEY_ARE = (ENVIRONMENT_FILE, START_FILE, *SERVICE_ID_FILES, METRICS_FILE, GOODPUT_FILE)
"""Files of the run folder that are copied beside its job and its checkpoints."""
_NOTE = "A copy that Clipship made of a run: `clipship resume` with its address fetches it and goes on."


@dataclass(frozen=True)
class CopiedRun:
    """The copy of one run at an address."""

    address: str

    @classmethod
    def of(cls, job: Job) -> "CopiedRun | None":
        """Returns the copy that a job's run makes; None if the job asks for none."""
        to = job.checkpoint.copy_to
        return None if to is None else cls(f"{to}/{job.name}")

    def whole(self) -> list[str]:
        """Returns the names of the checkpoints whose copy is whole, oldest first. Asks the store."""
        return [name for name in self._steps() if MANIFEST in names(self._at(CHECKPOINTS, name))]

    def manifest(self, name: str) -> dict[str, Any] | None:
        """Returns the manifest of a checkpoint's copy; None if the copy is not whole."""
        try:
            manifest = parse_json(read(self._at(CHECKPOINTS, name, MANIFEST)) or b"null")
        except ValueError:
            return None
        return manifest if isinstance(manifest, dict) else None

    def put_checkpoint(self, folder: Path, progress: Progress = lambda done, total: None) -> None:
        """Copies a whole checkpoint, unless it is there; what only changed in its manifest is copied alone.

        Raises InputError or StorageError, and OSError or ValueError if the folder cannot be read.
        """
        text = read_plain(folder / MANIFEST, links=True)
        files: dict[str, Any] = parse_json(text)["files"]
        there = self.manifest(folder.name)
        if there is None or there.get("files") != files:
            remove(self._at(CHECKPOINTS, folder.name, MANIFEST))
            done, total = 0, sum(seal["bytes"] for seal in files.values())
            for name, seal in files.items():
                progress(done, total)
                at = self._at(CHECKPOINTS, folder.name, name)
                put(folder / name, at, Seal(seal["bytes"], seal["sha256"]))
                done += seal["bytes"]
        put(text.encode(), self._at(CHECKPOINTS, folder.name, MANIFEST))

    def put_run(self, folder: Path, job: Job) -> None:
        """Copies what a new machine needs beside a checkpoint, such as the job without its secrets."""
        note = json_text({"run": job.name, "note": _NOTE}, indent=2)
        put(note.encode(), self._at(COPY_FILE))
        put(dump_without_secrets(job).encode(), self._at(JOB_FILE), private=True)
        for name in _AS_THEY_ARE:
            if (folder / name).is_file():
                put(read_part(folder / name, 0, MOST_LINES_BYTES), self._at(name))

    def put_best(self, checkpoints: Path) -> None:
        """Copies the record of the best checkpoint, if there is one."""
        if (checkpoints / BEST).is_file():
            put(read_plain(checkpoints / BEST).encode(), self._at(CHECKPOINTS, BEST))

    def prune(self, last: str, keep: int, best: str | None) -> list[InputError]:
        """Removes the copies of all checkpoints but the newest `keep` up to `last`, and the best one.

        Those of later steps belong to a run that went back, and those that are not whole to nobody. Returns
        why some stay. Raises InputError or StorageError if a later one does, which would be fetched.
        """
        whole = [name for name in self.whole() if _step(name) <= _step(last)]
        kept = {*whole[-keep:], *([best] if best in whole else [])}
        stay = []
        for name in self._steps():
            if name not in kept:
                try:
                    remove(self._at(CHECKPOINTS, name, MANIFEST))
                    remove(self._at(CHECKPOINTS, name))
                except InputError as error:
                    if _step(name) > _step(last):
                        raise
                    stay.append(error)
        return stay

    def fetch(
        self,
        out: Path,
        progress: Progress = lambda done, total: None,
        check: Callable[[Path], object] = lambda job_file: None,
    ) -> str:
        """Fetches the newest whole checkpoint, and the best one, into a run folder; returns its name.

        `out` appears when all is there and its checksums are right. A copy that is damaged, or lacks a file,
        is passed over. `check` gets the job file before any checkpoint is fetched. Raises what it raises,
        InputError if there is no whole copy, and StorageError if the store does not answer.
        """
        whole = self.whole()
        if not whole:
            raise InputError(
                f"{self.address}: there is no whole copy of a checkpoint: give the copy of a run"
            )
        with whole_folder(out) as beside:
            for name in (JOB_FILE, *_AS_THEY_ARE):
                self._get_if_there(name, beside)
            if not (beside / JOB_FILE).is_file():
                raise InputError(f"{self.address}: the copy lacks its {JOB_FILE}")
            check(beside / JOB_FILE)
            newest = self._fetch_newest(whole, beside / CHECKPOINTS, progress)
            self._fetch_best(newest, whole, beside / CHECKPOINTS)
        return newest

    def _fetch_newest(self, whole: list[str], checkpoints: Path, progress: Progress) -> str:
        for name in reversed(whole):
            try:
                self._fetch_checkpoint(checkpoints / name, progress)
                return name
            except (BrokenCheckpoint, InputError) as error:
                if isinstance(error, StorageError):
                    raise
                log.warning("copy         passed over: %s", error)
                shutil.rmtree(checkpoints / name)
        raise InputError(f"{self.address}: every copy of a checkpoint is damaged, or lacks a file")

    def _fetch_best(self, newest: str, whole: list[str], checkpoints: Path) -> None:
        record = read(self._at(CHECKPOINTS, BEST))
        try:
            best = folder_name(parse_json(record or b"null")["step"])
            if best != newest and best in whole:
                self._fetch_checkpoint(checkpoints / best)
            get(self._at(CHECKPOINTS, BEST), checkpoints / BEST)
        except StorageError:
            raise
        except (BrokenCheckpoint, InputError, ValueError, TypeError, KeyError):  # a run goes on without it
            return

    def _fetch_checkpoint(self, folder: Path, progress: Progress = lambda done, total: None) -> None:
        """Raises BrokenCheckpoint if what has come is not what the manifest says."""
        folder.mkdir(parents=True)
        at = self._at(CHECKPOINTS, folder.name)
        get(f"{at}/{MANIFEST}", folder / MANIFEST)
        files = _files_of(folder)
        done, total = 0, sum(files.values())
        for name, size in files.items():
            progress(done, total)
            if Path(name).name == name:  # else `verify` refuses it
                get(f"{at}/{name}", folder / name)
            done += size
        verify(folder)

    def _get_if_there(self, name: str, folder: Path) -> None:
        if (content := read(self._at(name), MOST_LINES_BYTES)) is not None:
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)

    def _steps(self) -> list[str]:
        found = [name for name in names(self._at(CHECKPOINTS)) if step_of(name) is not None]
        return sorted(found, key=_step)

    def _at(self, *parts: str) -> str:
        return "/".join((self.address, *parts))


def _step(name: str) -> int:
    return step_of(name) or 0


def _files_of(folder: Path) -> dict[str, int]:
    """Returns the files of a manifest with their sizes. Raises BrokenCheckpoint if it does not name them."""
    try:
        files = read_json(folder / MANIFEST, links=True)["files"]
        return {name: int(seal["bytes"]) for name, seal in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenCheckpoint(f"{folder}: its {MANIFEST} is malformed: {error!r}") from None
