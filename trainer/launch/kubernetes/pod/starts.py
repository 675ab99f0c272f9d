"""Starts of a run whose pods no launcher starts: which one a pod belongs to, when it begins, how it ended.

The pods of an Indexed Job meet in the run folder. A start has a folder there: with its token, a mark of each
pod that has come, the word to begin, and its end. The first pod to make a file wins, and none is changed
later. A start goes on while pods come and go; once it has ended, the next pod opens the next one. Imports no
torch.
"""

import errno
import os
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import EXIT_PREEMPTED, EXIT_START_AGAIN
from trainer.run.checkpoints import newest_step
from trainer.run.layout import ARTEFACTS, CHECKPOINTS, PODS
from trainer.run.retry import every, names_in, until
from trainer.run.starts import StartsSoFar, starts_of
from trainer.safe_io.atomic import is_void, make_once
from trainer.safe_io.plain import read_plain
from trainer.safe_io.values import value_lines
from trainer.world.rendezvous import Rendezvous
from trainer.world.restart_policy import after_end

_TOKEN, _MARKS, _BEGIN, _END = "token", "marks", "begin", "end"
_BEING_WRITTEN_S = 10.0


def leave_code(end: StartsSoFar) -> int:
    """Returns the exit code of the pods, which tells the Job whether to start others in their place."""
    return end.code if end.over or end.code == EXIT_PREEMPTED else EXIT_START_AGAIN


@dataclass(frozen=True)
class PodsStart:
    """One start of a Job's pods, with its folder."""

    run_folder: Path
    job: str
    """Uid of the Job; a new submission has another one."""
    number: int

    @property
    def folder(self) -> Path:
        return _folder(self.run_folder, self.job) / f"{self.number:05d}"

    @property
    def token(self) -> str:
        """Token of the supervisors, which only the job's own user can read. Raises OSError."""
        return _written(self.folder / _TOKEN)

    @property
    def name(self) -> str:
        """Name of the start in the run's exit files."""
        return Rendezvous("", 0, self.token).start

    def mark(self, index: int) -> bool:
        """Records that the pod of this index has come; returns False if one of this index came before."""
        return make_once(self.folder / _MARKS / str(index), "", private=True)

    def unmark(self, index: int) -> None:
        """Takes the mark back: the pod leaves before the start has begun."""
        with suppress(OSError):
            (self.folder / _MARKS / str(index)).unlink()

    def missing(self, pods: int) -> list[int]:
        """Returns the indices of the pods that have not come."""
        marks = set(os.listdir(self.folder / _MARKS))
        return [index for index in range(pods) if str(index) not in marks]

    def begin(self, address: str) -> None:
        """Lets the ranks of all pods start; `address` is that of the pod of index 0."""
        make_once(self.folder / _BEGIN, address, private=True)

    @property
    def began_at(self) -> str | None:
        """Address of the pod of index 0 when the ranks started; None if they have not."""
        names_in(self.folder)
        return _written(self.folder / _BEGIN) if (self.folder / _BEGIN).exists() else None

    @property
    def end(self) -> StartsSoFar | None:
        """End of this start, the same for every pod; None while it goes on."""
        names_in(self.folder)
        path = self.folder / _END
        return starts_of(_written(path)) if path.exists() else None

    def settle(self, code: int, message: str, retries: int) -> StartsSoFar:
        """Ends this start with the run's exit code; returns the end that the first pod has recorded."""
        before = PodsStart(self.run_folder, self.job, self.number - 1)
        earlier = before.end if self.number > 1 else None
        saved = newest_step(self.run_folder / CHECKPOINTS)
        end = after_end(
            earlier or StartsSoFar(self.job),
            code,
            asked=False,
            saved_step=saved,
            retries=retries,
            message=message,
        )
        make_once(self.folder / _END, value_lines(asdict(end)), private=True)
        return self.end or end


def open_start(run_folder: Path, job: str) -> PodsStart:
    """Returns the newest start of the Job; makes the next one if that has ended, but not for good.

    Raises OSError.
    """
    folder = _folder(run_folder, job)
    folder.mkdir(parents=True, exist_ok=True)
    newest = PodsStart(run_folder, job, max((int(name) for name in os.listdir(folder)), default=0))
    end = newest.end if newest.number else None
    goes_on = newest.number and (end is None or end.over)
    start = newest if goes_on else PodsStart(run_folder, job, newest.number + 1)
    while True:
        (start.folder / _MARKS).mkdir(parents=True, exist_ok=True)
        token = start.folder / _TOKEN
        if make_once(token, secrets.token_hex(16), private=True) or not is_void(token):
            return start
        start = PodsStart(run_folder, job, start.number + 1)


def _folder(run_folder: Path, job: str) -> Path:
    return run_folder / ARTEFACTS / PODS / job


def _written(path: Path) -> str:
    """Returns a file's text; waits for it if another pod has only just made the file. Raises OSError."""
    if text := until(lambda: read_plain(path), every(0.1, _BEING_WRITTEN_S)):
        return text
    raise OSError(errno.ENODATA, "the pod that made this file has not filled it", str(path))
