"""Keeps in the user's state how long a start like this one took the last time. Imports no torch.

What is kept is a hint for people who wait. Nothing fails without it.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainer.config import Job
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import read_json
from trainer.sysinfo.user_cache import user_state

_KEPT = 50
"""Kinds of starts whose times are kept, the newest ones."""


class StartTimes:
    """Seconds of each part of a run of this job with this many ranks, of the last such run."""

    def __init__(self, job: Job, ranks: int) -> None:
        parts = (job.model.name, job.model.precision, job.comm.backend, job.optim.global_batch_size, ranks)
        self._kind = " ".join(map(str, parts))

    def read(self) -> dict[str, float]:
        """Returns the seconds by the name of the part; empty if no such start is known."""
        times = _all_kinds().get(self._kind)
        if not isinstance(times, dict):
            return {}
        return {name: float(taken) for name, taken in times.items() if isinstance(taken, int | float)}

    def keep(self, times: Mapping[str, float]) -> None:
        """Writes these seconds over the last ones; those of parts that are not among them stay."""
        path = _file()
        if path is None or not times:
            return
        kinds = _all_kinds()
        rounded = {name: round(taken, 2) for name, taken in times.items()}
        newest = {**self.read(), **rounded}
        kinds.pop(self._kind, None)
        with suppress(OSError):
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            write_json(path, dict([*kinds.items(), (self._kind, newest)][-_KEPT:]))


def _file() -> Path | None:
    folder = user_state("starts")
    return folder and folder / "seconds.json"


def _all_kinds() -> dict[str, object]:
    path = _file()
    with suppress(OSError, ValueError):
        kinds = read_json(path) if path else {}
        return kinds if isinstance(kinds, dict) else {}
    return {}
