"""Writes checkpoints while training goes on: a snapshot in memory, then a thread. One at a time: a second waits for the first."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import files, state
from trainer.checkpoint.files import Folder
from trainer.job import Checkpoint
from trainer.step import TrainStep

log = logging.getLogger("clipship")

_PAGE = 2**16


@dataclass(frozen=True)
class Written:
    """What a checkpoint cost, for metrics.jsonl."""

    step: int
    checkpoint: str
    checkpoint_bytes: int
    write_s: float
    """In the thread, beside training."""


class Writer:
    """Each rank has one; rank 0 writes the weights and gives the folder its name, and every rank its part where the job says so."""

    def __init__(self, checkpoints: Path, settings: Checkpoint, rank: int, world_size: int, timeout_s: float) -> None:
        self._checkpoints, self._settings, self._timeout_s = checkpoints, settings, timeout_s
        self._rank, self._parts = rank, world_size if settings.every_rank_writes else 1
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: list[Written] = []

    def save(self, step: int, train: TrainStep, about: Mapping[str, Any], best: tuple[str, float] | None = None) -> None:
        """Snapshot now, write behind. Waits for the write before; what that met is raised here where the job says so.

        `best`, a metric and its value, makes it the one that is kept as soon as it is whole.
        """
        self._settle(fatal=self._settings.on_failure == "stop")
        if self._rank >= self._parts:
            return
        folder = Folder(self._checkpoints, step)
        contents: dict[str, state.State] = {
            state.optimizer_file(self._rank, self._parts): state.snapshot_optimizer(
                train.model, train.optimizer, train.scaler.state_dict(), self._rank, self._parts
            )
        }
        if self._rank == 0:
            contents[files.WEIGHTS] = state.snapshot_weights(train.model)
        write = partial(self._write, folder, contents, about, best)
        self._thread = threading.Thread(target=self._guarded, args=(folder, write), name="checkpoint")
        self._thread.start()

    def note(self, step: int, metrics: Mapping[str, float | int], best: tuple[str, float] | None) -> None:
        """What was measured of a step after `save`: into its manifest; `best` as there. Waits for the write."""
        self.wait()
        folder = Folder(self._checkpoints, step)
        if self._rank == 0 and folder.place.is_dir():  # else its write has failed, and the run goes on
            self._guarded(folder, partial(self._note, folder, metrics, best))

    def wait(self) -> None:
        """Until the write under way, if any, is over. What it met is raised where the job says so, else left for `finish`."""
        self._join()
        if self._error is not None and self._settings.on_failure == "stop":
            raise self._error

    def finish(self) -> None:
        """Wait for the write under way; what it met is raised whatever the job says, for no later one can make up for it."""
        self._settle(fatal=True)

    def pop_written(self) -> list[Written]:
        """What has been published since the last call; rank 0 only."""
        written, self._written = self._written, []
        return written

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _settle(self, fatal: bool) -> None:
        self._join()
        error, self._error = self._error, None
        if error is not None and fatal:
            raise error

    def _guarded(self, folder: Folder, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # given to the training thread by _settle
            self._error = error
            if self._settings.on_failure == "continue":
                log.error(
                    "checkpoint   NOT WRITTEN: %s. The run goes on (checkpoint.on_failure = continue); the one before is still good", error
                )
            if self._rank == 0:
                shutil.rmtree(folder.beside, ignore_errors=True)  # half a checkpoint would keep a full disk full
            else:
                folder.tell_failure(self._rank, error)

    def _write(self, folder: Folder, contents: Mapping[str, state.State], about: Mapping[str, Any], best: tuple[str, float] | None) -> None:
        start = time.monotonic()
        for name, content in contents.items():
            folder.write(name, partial(_write_state, content))
        if self._rank:
            return
        names = [files.WEIGHTS, *(state.optimizer_file(part, self._parts) for part in range(self._parts))]
        place = folder.publish(names, about, self._timeout_s)
        self._keep(folder, best)
        size = sum(path.stat().st_size for path in place.iterdir())
        self._written.append(Written(folder.step, place.name, size, round(time.monotonic() - start, 3)))
        log.info("%-12s %s, %.1f MB in %.1f s beside training", "checkpoint", place, size / 1e6, self._written[-1].write_s)

    def _note(self, folder: Folder, metrics: Mapping[str, float | int], best: tuple[str, float] | None) -> None:
        folder.note_metrics(metrics)
        self._keep(folder, best)

    def _keep(self, folder: Folder, best: tuple[str, float] | None) -> None:
        """The last ones and the best one stay."""
        if best is not None:
            files.note_best(self._checkpoints, folder.step, *best)
        files.prune(self._checkpoints, self._settings.keep)


def _write_state(content: state.State, path: Path) -> None:
    """Raises OSError with the reason where the disk takes no more."""
    try:
        torch.save(content, path)
    except RuntimeError:  # torch says only that writing failed: the file system says why
        with open(path, "ab") as file:
            file.write(bytes(_PAGE))
            file.flush()
            os.fsync(file.fileno())
        raise
