"""What a start leaves in the run folder when it ends: exit.json and diagnosis.json. The first supervisor to write each wins. No torch.

While another start of the run writes the folder, they are its own: nothing is written then, and nothing taken away.
A shared file system may hang together with the run: nobody here waits for it longer than WAIT_S.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from trainer.exits import ExitRecord
from trainer.run_lock import who_holds
from trainer.whole_file import write_json

DIAGNOSIS_FILE = "diagnosis.json"
EXIT_FILE = "exit.json"
WAIT_S = 3.0
_FILES = (EXIT_FILE, DIAGNOSIS_FILE)
Result = TypeVar("Result")


class LastWords:
    """Of one supervisor: `writer` is its rank, `start` what `Meeting.start` says. Without a run folder nothing is written."""

    def __init__(self, run_folder: str, start: str = "", writer: int = 0) -> None:
        self._folder, self._start, self._writer = Path(run_folder) if run_folder else None, start, writer

    async def forget(self) -> None:
        """Take away what an earlier start left, which would be taken for this one's end."""
        await within(WAIT_S, self._forget)

    async def keep(self, name: str, value: Mapping[str, Any]) -> str:
        """The file's path; "" where the folder is not known, or it takes no file: the console still has the text."""
        return await within(WAIT_S, lambda: self._keep(name, value)) or ""

    def _forget(self) -> None:
        if self._folder is not None:
            forget(self._folder, self._start)

    def _keep(self, name: str, value: Mapping[str, Any]) -> str:
        if self._folder is None or _is_anothers(self._folder, self._start):
            return ""
        self._folder.mkdir(parents=True, exist_ok=True)  # ranks that never met have not made it
        path = self._folder / name
        if _read(path).get("start") != self._start:  # the first one of this start to write is right
            own = path.with_name(f".{name}.of-{self._writer}")  # others may be writing at the same time
            write_json(own, {**value, "start": self._start})
            os.replace(own, path)
        return str(path)


def forget(run_folder: Path, start: str) -> None:
    """Take away what earlier starts left, where no other one writes the folder. Raises OSError."""
    if not _is_anothers(run_folder, start):
        for name in _FILES:
            (run_folder / name).unlink(missing_ok=True)


def forget_others(run_folder: Path, start: str) -> None:
    """Take away what starts but this one left in a folder that has just become this one's. Raises OSError."""
    for name in _FILES:
        if start and _read(run_folder / name).get("start", start) != start:
            (run_folder / name).unlink(missing_ok=True)


def _is_anothers(run_folder: Path, start: str) -> bool:
    holder = who_holds(run_folder)
    return holder is not None and holder.start != start


def end_of(run_folder: Path, start: str) -> ExitRecord | None:
    """How this start of the run ended, None where its supervisors left no word, or an older start's is what lies there."""
    found = _read(run_folder / EXIT_FILE)
    with suppress(TypeError):
        return ExitRecord(**found) if found.get("start") == start else None
    return None


async def within(seconds: float, work: Callable[[], Result]) -> Result | None:
    """The result of file work; None where it fails, or takes longer: its thread is then left behind and keeps no process alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Result | None] = loop.create_future()

    def tell(value: Result | None) -> None:
        if not result.done():
            result.set_result(value)

    def attempt() -> None:
        value = None
        with suppress(OSError):
            value = work()
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, value)

    threading.Thread(target=attempt, daemon=True).start()
    with suppress(TimeoutError):
        return await asyncio.wait_for(result, seconds)
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
