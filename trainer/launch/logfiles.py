"""The ranks' log files of a run folder as one stream: in the order of time, each line with its rank. Imports no torch."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import EXIT_PREEMPTED, InputError

_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
_NAME = re.compile(r"rank-(\d{5,})\.log")
_POLL_S = 0.5


@dataclass
class _File:
    """One rank's log, read as it grows."""

    path: Path
    rank: int
    read: int = 0
    rest: bytes = b""
    stamp: str = ""

    def new_lines(self) -> Iterator[tuple[str, int, str]]:
        """Time, rank and text of each line that is new and whole; a line without a time goes with the one before it."""
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self.read)
            new = file.read()
            self.read += len(new)
            *whole, self.rest = (self.rest + new).split(b"\n")
            for line in whole:
                text = line.decode(errors="replace")
                self.stamp = text[:24] if _STAMP.match(text) else self.stamp
                yield self.stamp, self.rank, text

    def last_words(self) -> Iterator[str]:
        """A line that nobody ended: of a process that was killed as it spoke."""
        if self.rest:
            yield f"[{self.rank}] {self.rest.decode(errors='replace')}"


def log_lines(folder: Path, rank: int | None, *, follow: bool, over: Callable[[], bool] | None = None) -> Iterator[str]:
    """`[rank] line`; with `follow`, until the run has ended. Raises InputError where there is nothing to show.

    `over` knows whether it has; without it, the run folder is asked.
    """
    files: dict[Path, _File] = {}
    if not _opened(folder, rank, files) and not follow:
        raise InputError(_nothing(folder, rank))
    while True:
        ended = over() if over else _has_ended(folder)  # asked first: what is written before the end is still shown
        new = [line for file in _opened(folder, rank, files) for line in file.new_lines()]
        for _, which, text in sorted(new, key=lambda line: line[:2]):
            yield f"[{which}] {text}"
        if not follow or (ended and not new):
            for file in files.values():
                yield from file.last_words()
            return
        time.sleep(_POLL_S)


def has_logs(folder: Path) -> bool:
    """Has any rank said anything?"""
    return any(_NAME.fullmatch(path.name) for path in (folder / "logs").glob("rank-*.log"))


def _opened(folder: Path, rank: int | None, files: dict[Path, _File]) -> list[_File]:
    """Those of before, and those that are new."""
    for path in sorted((folder / "logs").glob("rank-*.log")):
        name = _NAME.fullmatch(path.name)
        if name and path not in files and rank in (None, int(name[1])):
            files[path] = _File(path, int(name[1]))
    return list(files.values())


def _has_ended(folder: Path) -> bool:
    """A run that was stopped and saved may be started again by its scheduler."""
    if (folder / "result.json").exists():
        return True
    try:
        return bool(json.loads((folder / "exit.json").read_text())["exit_code"] != EXIT_PREEMPTED)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _nothing(folder: Path, rank: int | None) -> str:
    logs = folder / "logs"
    if rank is None:
        return f"{logs} holds no log of a rank yet: the run has not begun"
    found = sorted(int(name[1]) for path in logs.glob("rank-*.log") if (name := _NAME.fullmatch(path.name)))
    return f"rank {rank} has no log in {logs}: " + (f"there are ranks {found[0]} to {found[-1]}" if found else "the run has not begun")
