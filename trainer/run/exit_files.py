"""Writes exit.json and diagnosis.json into the run folder when a start ends, and restarts.json before.

The times of restarts and of the end also go to goodput.jsonl, and what the launcher must know to
`launcher_word`.

The first supervisor to write exit.json or diagnosis.json wins. While another start of the run holds the
folder, nothing is written or removed. A shared file system may hang together with the run, so no call waits
longer than WAIT_S seconds. Imports no torch.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainer.run import goodput_log, launcher_word
from trainer.run.checkpoints import newest_step
from trainer.run.exit_record import ExitRecord
from trainer.run.file_work import THREADS, FileWork, Result
from trainer.run.generations import GenerationClaim, announce, claim, newest_claim, remove_claims
from trainer.run.launcher_word import StartRequest, requested_start
from trainer.run.layout import (
    CHECKPOINTS,
    DIAGNOSIS_FILE,
    EXIT_FILE,
    GOODPUT_FILE,
    LOCK,
    RESTARTS_FILE,
)
from trainer.run.lock import who_holds
from trainer.run.notify import SEND_S, SILENT, Notifier
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import read_as, read_json
from trainer.safe_io.values import read_values
from trainer.text.masking import masked_values

WAIT_S = 3.0
_FILES = (EXIT_FILE, DIAGNOSIS_FILE, RESTARTS_FILE)


class ExitFiles:
    """Exit files of one start, written by one supervisor.

    `start` is its name as in `Rendezvous.start`. Without a run folder nothing is written. What is new in a
    file goes to the `notifier`, too.
    """

    def __init__(
        self,
        run_folder: str,
        start: str = "",
        notifier: Notifier = SILENT,
        *,
        work: FileWork = THREADS,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self.start = Path(run_folder) if run_folder else None, start
        self._notifier, self._work, self._wall_time = notifier, work, wall_time
        self._news: list[Callable[[], None]] = []
        """Messages of what is written, which are to be sent."""
        self._began = goodput_log.began(os.environ, wall_time())
        self._recorded: Sequence[Mapping[str, Any]] = ()
        """Restarts as goodput.jsonl has them."""
        self._seen = self._folder is not None and self._folder.is_dir()
        """True once the folder was there: if it is not any more, somebody renamed or removed it."""
        self._writing = threading.Lock()
        """Lets one thread write at a time: an abandoned one may still be waiting for the file system."""

    async def remove_old(self) -> None:
        """Remove the exit files of an earlier start, which would be taken for this one's."""
        await self._look(lambda folder: remove_exit_files(folder, self.start))

    async def write(self, name: str, value: Mapping[str, Any]) -> str:
        """Write one exit file and return its path.

        Returns "" if the folder is unknown or cannot be written; the console still has the text.
        """
        path = await self._work.within(WAIT_S, lambda: self._write(name, value)) or ""
        while self._news:
            await self._work.within(SEND_S, self._news.pop(0))
        return path

    async def update_restarts(self, restarts: Sequence[Mapping[str, Any]]) -> None:
        """Write the restarts of this start so far, in place of an earlier list.

        The lock file gets a new modification time, so that observers do not take the run for dead until its
        new rank 0 has the lock.
        """
        await self._work.within(WAIT_S, lambda: self._write_restarts(restarts))
        while self._news:
            self._work.do(self._news.pop(0))

    async def is_going_on(self) -> bool:
        """Returns whether a rank 0 of this start holds the run folder: then the run has not ended."""
        holder = await self._look(who_holds)
        return holder is not None and holder.start == self.start

    async def request_start(self, its: StartRequest, *, if_killed: bool = False) -> None:
        """Asks the launcher to start all supervisors again as the generation that the request's record names.

        With `if_killed` it counts only if all supervisors are killed before one of them can ask.
        """
        await self._tell_launcher(
            lambda folder: launcher_word.ask(folder, self.start, its, if_killed=if_killed)
        )

    async def withdraw_start(self) -> None:
        """Withdraws what was asked for with `if_killed`."""
        await self._tell_launcher(lambda folder: launcher_word.withdraw(folder, self.start))

    async def _tell_launcher(self, tell: Callable[[Path], None]) -> None:
        def write() -> None:
            if (folder := self._writable()) is not None:
                with self._writing:  # else the end, told meanwhile, would be withdrawn instead
                    tell(folder)

        await self._work.within(WAIT_S, write)

    async def requested_start(self) -> StartRequest | None:
        """Returns the last request of this start to start all supervisors again; None if there is none."""
        return await self._look(lambda folder: requested_start(folder, self.start))

    async def claim(self, its: GenerationClaim) -> GenerationClaim | None:
        """Claims a generation; returns None if that succeeded, else the claim that is in the way.

        Raises OSError if there is no run folder, or if it cannot be written in time: nobody gets a generation
        then.
        """
        folder = self._folder
        if folder is None:
            raise FileNotFoundError("there is no run folder")
        return await self._work.answered(WAIT_S, lambda: claim(folder, its))

    async def announce(self, its: GenerationClaim) -> None:
        """Tells where one that comes back finds this coordinator, see `generations.announce`."""
        await self._look(lambda folder: announce(folder, its))

    async def end(self) -> ExitRecord | None:
        """Returns how this start has ended; None if it has not, or if the folder does not answer."""
        return await self._look(lambda folder: exit_record_of(folder, self.start))

    async def newest_claim(self) -> GenerationClaim | None:
        """Returns the claim of this start's newest generation; None if there is none.

        Raises OSError if the folder does not answer in time.
        """
        folder = self._folder
        return (
            None
            if folder is None
            else await self._work.answered(WAIT_S, lambda: newest_claim(folder, self.start))
        )

    async def restarts(self) -> list[dict[str, Any]]:
        """Returns the restarts of this start so far, as restarts.json has them.

        Raises OSError if the folder does not answer in time.
        """
        folder = self._folder
        return (
            []
            if folder is None
            else await self._work.answered(WAIT_S, lambda: restarts_of(folder, self.start))
        )

    async def newest_checkpoint(self) -> int | None:
        """Returns the step of the newest whole checkpoint, 0 if there is none.

        Returns None if the folder is unknown or does not answer in time.
        """
        return await self._look(lambda folder: newest_step(folder / CHECKPOINTS))

    async def _look(self, look: Callable[[Path], Result]) -> Result | None:
        """Returns what `look` finds in the run folder; None without one, or if it does not answer in time."""
        folder = self._folder
        return None if folder is None else await self._work.within(WAIT_S, lambda: look(folder))

    def _write_restarts(self, restarts: Sequence[Mapping[str, Any]]) -> None:
        if path := self._write(RESTARTS_FILE, {"restarts": list(restarts)}, again=True):
            rows = [{name: row[name] for name in row if name != "details"} for row in restarts]
            for row in rows:
                if row not in self._recorded:
                    self._add_times("restart", row)
                if row.get("generation") not in {each.get("generation") for each in self._recorded}:
                    self._news.append(partial(self._notifier.tell_restart, row))
            self._recorded = rows
            os.utime(Path(path).with_name(LOCK))

    def _add_times(self, event: str, values: Mapping[str, Any]) -> None:
        """Adds a line to goodput.jsonl, which a run that was refused at its start does not have."""
        if self._folder is not None and (event != "end" or (self._folder / GOODPUT_FILE).exists()):
            line = {"event": event, "start": self.start, **masked_values(values)}
            with suppress(OSError):  # a full disk keeps no run from going on
                goodput_log.append(self._folder, line)

    def _writable(self) -> Path | None:
        """Returns the folder, which is made if it is missing; None if this start may not write there."""
        if self._folder is None or _is_held_by_other(self._folder, self.start):
            return None
        if self._seen and not self._folder.is_dir():
            return None  # made again, it would stand in the way of the one that was renamed
        self._folder.mkdir(parents=True, exist_ok=True)  # it is missing if the ranks never met
        self._seen = True
        return self._folder

    def _write(self, name: str, value: Mapping[str, Any], *, again: bool = False) -> str:
        if (folder := self._writable()) is None:
            return ""
        path = folder / name
        with self._writing:
            # The first supervisor of this start to write wins.
            if again or _read(path).get("start") != self.start:
                told = {**masked_values(value), "start": self.start}
                if name == EXIT_FILE:  # a batch script reads its last word once the file is there
                    with suppress(OSError):  # the record serves those who read it all the same
                        launcher_word.tell_end(folder, self.start, told)
                write_json(path, told)
                if name == EXIT_FILE:
                    end = {each: value.get(each) for each in ("generation", "exit_code")}
                    self._add_times("end", {"began": self._began, "time": self._wall_time(), **end})
                    self._news.append(partial(self._notifier.tell_end, value))
        return str(path)


def remove_exit_files(run_folder: Path, start: str) -> None:
    """Remove the exit files of earlier starts, unless another start holds the folder. Raises OSError.

    The lock file gets a new modification time, so that observers see the new start before its rank 0 has the
    lock.
    """
    if not _is_held_by_other(run_folder, start):
        for path in (*_FILES, launcher_word.WORD):
            (run_folder / path).unlink(missing_ok=True)
        remove_claims(run_folder, start)
        with suppress(OSError):
            os.utime(run_folder / LOCK)


def remove_other_exit_files(run_folder: Path, start: str) -> None:
    """Remove the exit files of all starts but this one, from a folder that this start has just taken over.

    Raises OSError.
    """
    for name in _FILES:
        if start and _read(run_folder / name).get("start", start) != start:
            (run_folder / name).unlink(missing_ok=True)
    if start and read_values(run_folder / launcher_word.WORD).get("start", start) != start:
        (run_folder / launcher_word.WORD).unlink(missing_ok=True)


def _is_held_by_other(run_folder: Path, start: str) -> bool:
    holder = who_holds(run_folder)
    return holder is not None and holder.start != start


def exit_record_of(run_folder: Path, start: str) -> ExitRecord | None:
    """Returns how this start of the run ended.

    Returns None if its supervisors wrote nothing, or if the file is an older start's.
    """
    record = last_exit(run_folder)
    return record if record is not None and record.start == start else None


def last_exit(run_folder: Path) -> ExitRecord | None:
    """Returns how the last start of the run that ended did so; None if nothing says it."""
    return read_as(ExitRecord, run_folder / EXIT_FILE)


def restarts_of(run_folder: Path, start: str) -> list[dict[str, Any]]:
    """Returns the restarts of this start so far; none if the file is an older start's."""
    record = _read(run_folder / RESTARTS_FILE)
    restarts = record.get("restarts") if record.get("start") == start else None
    return restarts if isinstance(restarts, list) else []


def _read(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
