"""Writes checkpoints while training goes on: takes a snapshot in memory, then writes it in a thread.

Only one is written at a time: a second waits for the first.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.checkpoint import files, state
from trainer.checkpoint.files import Folder
from trainer.comm import host_memory
from trainer.config import Checkpoint
from trainer.errors import MachineError
from trainer.run.checkpoints import newest_whole
from trainer.sysinfo.shortage import with_missing_room

log = logging.getLogger("clipship")

_PAGE = 2**16


@dataclass(frozen=True)
class Written:
    """Cost of a checkpoint, for metrics.jsonl."""

    step: int
    checkpoint: str
    checkpoint_bytes: int
    write_s: float
    """Seconds of writing, in the thread, beside training."""


class Copies(Protocol):
    """Copies whole checkpoints to another place, as `trainer.copies.copier` does."""

    def offer(self, step: int) -> None:
        """Takes note of a checkpoint that is whole on disk, or whose manifest has changed."""

    @property
    def held(self) -> Collection[str]:
        """Names of the checkpoints that have to stay on disk."""


class CheckpointWriter:
    """Writes one rank's part of the checkpoints.

    Rank 0 writes the weights and gives the folder its name; every rank writes its part if the job says so.
    """

    def __init__(
        self,
        checkpoints: Path,
        settings: Checkpoint,
        rank: int,
        world_size: int,
        timeout_s: float,
        model_files: Mapping[str, bytes] | None = None,
        copies: Copies | None = None,
    ) -> None:
        """`model_files` are small files, by name, that every checkpoint gets beside the weights.

        `copies` is told of every checkpoint; rank 0 alone has it.
        """
        self._checkpoints, self._settings, self._timeout_s = checkpoints, settings, timeout_s
        self._run = _identity(checkpoints.parent)
        self._model_files, self._copies = model_files or {}, copies
        self._rank, self._parts = rank, world_size if settings.every_rank_writes else 1
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: list[Written] = []
        self._size = 0

    def save(
        self,
        step: int,
        train: state.TrainState,
        about: Mapping[str, Any],
        best: tuple[str, float] | None = None,
    ) -> None:
        """Takes a snapshot now and writes it in the background, after waiting for the previous write.

        Collective if the ranks split the model.

        If that write failed, its error is raised here if the job says so. `best`, a metric and its value,
        marks this checkpoint as the best as soon as it is complete.
        """
        self._settle(fatal=self._settings.on_failure == "stop")
        writes = self._rank < self._parts
        if not writes and not train.shards.split:
            return
        contents = state.contents_of(train, self._rank, self._parts)
        shared = state.shared_files(train)
        own = {state.optimizer_file(self._rank, self._parts), *(shared if self._rank == 0 else [])}
        snapshot = state.Snapshot(contents, others=contents.keys() - own)
        if not writes:
            return
        folder = Folder(self._checkpoints, step)
        self._size = snapshot.nbytes
        write = partial(self._write, folder, snapshot, shared, about, best)
        thread = threading.Thread(target=self._guarded, args=(folder, write), name="checkpoint")
        try:
            thread.start()
        except RuntimeError:  # there may be no more threads, and this may be the last checkpoint
            self._guarded(folder, write)
        else:
            self._thread = thread

    def reserve(self, train: state.TrainState) -> None:
        """Takes the page-locked memory of the snapshots in a thread, beside the first steps.

        The first snapshot would stall its step by that. The optimizer must have its state.
        """
        # A write under way has taken it, and must stay the one that is waited for.
        if self._thread is not None or self._rank >= self._parts or train.shards.split:
            return
        if blocks := state.blocks_of(state.contents_of(train, self._rank, self._parts)):
            thread = threading.Thread(target=_reserve, args=(blocks,), name="checkpoint memory")
            with suppress(RuntimeError):  # there may be no more threads
                thread.start()
                self._thread = thread

    def record(self, step: int, metrics: Mapping[str, float | int], best: tuple[str, float] | None) -> None:
        """Adds a step's metrics to its manifest, and marks it as best if `best` is given.

        The metrics are measured after `save`. Waits for the write to end.
        """
        self.wait()
        folder = Folder(self._checkpoints, step)
        if self._rank == 0 and folder.final.is_dir():  # else its write failed, and the run goes on
            self._guarded(folder, partial(self._record, folder, metrics, best))

    def wait(self) -> None:
        """Waits until the write under way, if any, is over.

        Its error is raised if the job says so, else left for `finish`.
        """
        self._join()
        if self._error is not None and self._settings.on_failure == "stop":
            raise self._error

    def finish(self) -> None:
        """Waits for the write under way and raises its error, whatever the job says.

        No later write can replace it.
        """
        self._settle(fatal=True)

    def pop_written(self) -> list[Written]:
        """Returns the checkpoints published since the last call; rank 0 only."""
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
        except Exception as problem:  # _settle gives it to the training thread
            if self._rank == 0:
                # Half a checkpoint would keep a full disk full.
                shutil.rmtree(folder.partial, ignore_errors=True)
            error = with_missing_room(
                problem, f"the checkpoint of step {folder.step}", self._size, self._checkpoints
            )
            self._error = error
            if self._settings.on_failure == "continue":
                newest = newest_whole(self._checkpoints)
                log.error(
                    "checkpoint   NOT WRITTEN: %s. The run goes on (checkpoint.on_failure = continue); %s.",
                    error,
                    f"the newest whole one is {newest[1].name}" if newest else "no step of it is saved yet",
                )
            if self._rank:
                folder.mark_failed(self._rank, error)

    def _write(
        self,
        folder: Folder,
        snapshot: state.Snapshot,
        shared: list[str],
        about: Mapping[str, Any],
        best: tuple[str, float] | None,
    ) -> None:
        start = time.monotonic()
        if self._run is not None and _identity(self._checkpoints.parent) != self._run:
            raise MachineError(
                f"the run folder {self._checkpoints.parent} was renamed or removed while the run wrote it: "
                "give it its name again, or stop the run"
            )
        for name, content in snapshot.get().items():
            folder.write(name, partial(_write_state, content))
        if self._rank:
            return
        for name, text in self._model_files.items():
            folder.write(name, partial(_write_bytes, text))
        names = [*shared, *self._model_files]
        names += (state.optimizer_file(part, self._parts) for part in range(self._parts))
        final = folder.publish(names, about, self._timeout_s)
        self._keep(folder, best)
        size = sum(path.stat().st_size for path in final.iterdir())
        self._written.append(Written(folder.step, final.name, size, round(time.monotonic() - start, 3)))
        log.info(
            "%-12s %s, %.1f MB written in %.1f s during training",
            "checkpoint",
            final,
            size / 1e6,
            self._written[-1].write_s,
        )

    def _record(
        self, folder: Folder, metrics: Mapping[str, float | int], best: tuple[str, float] | None
    ) -> None:
        folder.record_metrics(metrics)
        self._keep(folder, best)

    def _keep(self, folder: Folder, best: tuple[str, float] | None) -> None:
        """Removes all checkpoints but the last ones and the best one, after marking `best`."""
        if best is not None:
            files.record_best(self._checkpoints, folder.step, *best)
        if self._copies is not None:
            self._copies.offer(folder.step)
        files.prune(
            self._checkpoints, self._settings.keep, self._copies.held if self._copies is not None else ()
        )


def _reserve(blocks: list[int]) -> None:
    with suppress(RuntimeError):  # the snapshot says it, if there is too little memory then
        host_memory.reserve(blocks)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Returns what tells a folder from another one of its name; None if there is none."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _write_bytes(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _write_state(content: state.State, path: Path) -> None:
    """Writes the state to a file. Raises OSError with the reason if the disk takes no more."""
    try:
        torch.save(content, path)
    except RuntimeError:
        # torch only says that writing failed; this second write raises the file system's reason.
        with open(path, "ab") as file:
            file.write(bytes(_PAGE))
            file.flush()
            os.fsync(file.fileno())
        raise
