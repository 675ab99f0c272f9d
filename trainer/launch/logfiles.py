"""The ranks' log files of a run folder as one stream: in the order of time, each line with its rank.

Imports no torch.
"""

import heapq
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import EXIT_PREEMPTED, InputError
from trainer.launch.same_lines import each_once
from trainer.report.folder import last_lines
from trainer.report.liveness import is_dead
from trainer.run.layout import EXIT_FILE, JOB_FILE, LOGS, RESULT_FILE, START_FILE, rank_logs
from trainer.safe_io.plain import read_json, read_part
from trainer.text.terminal import say

_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
_BEFORE_MESSAGE = re.compile(_STAMP.pattern + r"[A-Z]+ ")
_POLL_S = 0.5
_AT_ONCE = 256 * 1024
"""Bytes of one log that are read at once; thousands of ranks may have one."""
_LONGEST = 2**20
"""Bytes after which a line without an end is shown as it is."""


@dataclass
class _File:
    """Log file of one rank, read as it grows."""

    path: Path
    rank: int
    read: int = 0
    rest: bytes = b""
    stamp: str = ""
    refused: bool = False

    def new_lines(self) -> Iterator[tuple[str, int, str]]:
        """Yields time, rank and text of each new complete line, in order; holds a part of the file only.

        A line without a time has that of the line before it.
        """
        while new := self._next_bytes():
            *whole, self.rest = (self.rest + new).split(b"\n")
            if len(self.rest) > _LONGEST:
                whole, self.rest = [*whole, self.rest], b""
            for line in whole:
                text = line.decode(errors="replace")
                self.stamp = text[:24] if _STAMP.match(text) else self.stamp
                yield self.stamp, self.rank, text

    def _next_bytes(self) -> bytes:
        """Returns what comes next; nothing of a file that is gone, or cannot be read, which is said."""
        try:
            new = read_part(self.path, self.read, _AT_ONCE)
        except FileNotFoundError:
            return b""
        except OSError as problem:
            if not self.refused:
                say(f"{self.path} is left out: {problem.strerror}")
            self.refused = True
            return b""
        self.read += len(new)
        return new

    def unfinished_line(self) -> Iterator[str]:
        """Yields an unfinished last line, as a process leaves it that is killed while it writes."""
        if self.rest:
            yield f"[{self.rank}] {self.rest.decode(errors='replace')}"


def log_lines(
    folder: Path, rank: int | None, *, follow: bool, over: Callable[[], bool] | None = None
) -> Iterator[str]:
    """Yields `[rank] line`; with `follow`, until the run has ended.

    A line that several ranks wrote at about the same time comes once, with all of them: `[0-3] line`.
    `over` tells whether it has; without it, the run folder is asked. What it waits for is said on stderr.
    Raises InputError if there is nothing to show, with `follow` if nothing can come.
    """
    _check_listed(folder / LOGS)
    files: dict[Path, _File] = {}
    if not _opened(folder, rank, files) and (not follow or (over is None and not _can_come(folder))):
        raise InputError(_no_logs(folder, rank))
    waits_for = ""
    while True:
        if follow and (text := _awaited(folder, files)) != waits_for:
            waits_for = text
            if text:
                say(text)
        # asked before reading, so that lines written before the end are still shown
        ended = over() if over else _has_ended(folder)
        new = heapq.merge(
            *(file.new_lines() for file in _opened(folder, rank, files)), key=lambda line: line[:2]
        )
        grew = False
        for shown in each_once(new):
            grew = True
            yield shown
        if not follow or (ended and not grew):
            for file in files.values():
                yield from file.unfinished_line()
            return
        time.sleep(_POLL_S)


def plain_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file that no rank wrote, such as a batch script's output."""
    file = _File(path, 0)
    yield from (text for _, _, text in file.new_lines())
    if file.rest:
        yield file.rest.decode(errors="replace")


def has_logs(folder: Path) -> bool:
    """Returns whether any rank has a log file."""
    return any(rank_logs(folder))


def last_message(folder: Path) -> str:
    """Returns the last line of rank 0's log, without time and level; "" if it has none."""
    for _, path in rank_logs(folder)[:1]:
        for line in reversed(last_lines(path)):
            if line.strip():
                return _BEFORE_MESSAGE.sub("", line).strip()
    return ""


def _opened(folder: Path, rank: int | None, files: dict[Path, _File]) -> list[_File]:
    """Returns the open log files, with those that are new."""
    for which, path in rank_logs(folder):
        if path not in files and rank in (None, which):
            files[path] = _File(path, which)
    return list(files.values())


def _check_listed(logs: Path) -> None:
    """Raises InputError if the folder of logs is there and cannot be read, which `rank_logs` passes over."""
    try:
        os.listdir(logs)
    except FileNotFoundError:
        pass
    except OSError as problem:
        raise InputError(f"{logs} cannot be read: {problem.strerror}") from None


def _can_come(folder: Path) -> bool:
    """Returns whether somebody has started the run, so that its ranks may still write logs."""
    return any((folder / name).exists() for name in (START_FILE, JOB_FILE, EXIT_FILE))


def _awaited(folder: Path, files: Collection[object]) -> str:
    """Returns what a follower of the logs waits for if no rank may be running; "" otherwise."""
    if not (folder / RESULT_FILE).exists() and _exit_code(folder) == EXIT_PREEMPTED:
        return "the run was stopped: waiting until it is started again; Ctrl-C ends this"
    return "" if files else f"no rank has a log in {folder / LOGS} yet: waiting for the first"


def _has_ended(folder: Path) -> bool:
    """Returns whether the run is over.

    A run that was stopped and saved is not, because its scheduler may start it again; a run whose processes
    are gone without a record is.
    """
    if (folder / RESULT_FILE).exists() or is_dead(folder):
        return True
    return _exit_code(folder) not in (None, EXIT_PREEMPTED)


def _exit_code(folder: Path) -> object:
    """Returns the exit code in the record of how the last start ended; None if there is none."""
    try:
        return read_json(folder / EXIT_FILE)["exit_code"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _no_logs(folder: Path, rank: int | None) -> str:
    logs = folder / LOGS
    if rank is None:
        return f"no rank has a log in {logs} yet: the run has not started"
    ranks = [which for which, _ in rank_logs(folder)]
    return f"rank {rank} has no log in {logs}: " + (
        f"ranks {ranks[0]} to {ranks[-1]} have one" if ranks else "the run has not started"
    )
