"""Copies each whole checkpoint to `checkpoint.copy_to` beside training, in a thread of rank 0. No torch.

A copy that fails stops no training: it is told, counted, and tried again, with the newest checkpoint of then.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import files
from trainer.checkpoint.identity import RunIdentity
from trainer.comm.rank_zero import of_rank_0
from trainer.config import Job
from trainer.copies.copied_run import CopiedRun
from trainer.copies.place import check_place, refuse_another_run
from trainer.errors import StorageError
from trainer.run.checkpoints import folder_name, newest_step, read_best
from trainer.run.layout import COPIES_FILE, Run
from trainer.run.retry import Backoff
from trainer.safe_io.atomic import write_json
from trainer.text.masking import masked

if TYPE_CHECKING:  # protocol imports torch, which `clipship check` does not need
    from trainer.comm.protocol import Comm

log = logging.getLogger("clipship")

STOPPED_WAIT_S = 10.0
"""Longest that a run which was asked to stop waits for its copies: whoever asked may not wait longer."""
_AGAIN = Backoff(15.0, 300.0)
_AGAIN_AT_END_S = 5.0
_TOLD_EVERY_S = 10.0


class Copier:
    """Copies the newest checkpoint that it was offered; one that comes meanwhile is next."""

    def __init__(self, job: Job, run: Run, to: CopiedRun, identities: Sequence[RunIdentity]) -> None:
        """`identities` are those of the run's stages: the copies there must belong to one of them."""
        self._job, self._run, self._to, self._identities = job, run, to, identities
        self._changed = threading.Condition()
        self._offered: set[int] = set()
        """Steps of the checkpoints that are not copied, nor passed by one that is."""
        self._wanted: int | None = None
        self._copying: int | None = None
        self._copied: int | None = None
        self._bytes = (0, 0)
        self._failed: str | None = None
        self._failures = 0
        self._told_stay = False
        self._ends = False
        threading.Thread(target=self._work, name="copies", daemon=True).start()

    def offer(self, step: int) -> None:
        """Takes note of a checkpoint that is whole on disk, or whose manifest has changed."""
        with self._changed:
            self._offered.add(step)
            self._wanted = step
            self._changed.notify_all()
        self._write_record()

    @property
    def held(self) -> frozenset[str]:
        """Names of the checkpoints that have to stay on disk."""
        with self._changed:
            return frozenset(folder_name(step) for step in (self._wanted, self._copying) if step is not None)

    def figures(self) -> dict[str, Any]:
        """Returns what a record of metrics.jsonl says of the copies; no step before the first is there."""
        with self._changed:
            copied = {} if self._copied is None else {"copied_step": self._copied}
            return {**copied, "copies_behind": len(self._offered)}

    def finish(self, longest_s: float) -> dict[str, Any]:
        """Waits so many seconds for the last copy, says how that went, and returns it for result.json."""
        deadline = time.monotonic() + longest_s
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            while self._busy and (left_s := deadline - time.monotonic()) > 0:
                if not self._changed.wait_for(lambda: not self._busy, min(left_s, _TOLD_EVERY_S)):
                    self._tell_waiting()
            behind, failed = self._busy, self._failed or f"not done within {longest_s:.0f} s"
        files.prune(self._run.checkpoints, self._job.checkpoint.keep)  # what is not done by now is cut off
        self._write_record()
        if behind:
            newest = "there is no whole one" if self._copied is None else f"the newest is step {self._copied}"
            log.error(
                "copies       the last checkpoint is NOT COPIED to %s: %s; %s. It is in the run folder, and "
                "the next start copies it.",
                self._to.address, failed, newest,
            )  # fmt: skip
        return {**self.figures(), **({"copy_failed": failed} if behind else {})}

    @property
    def _busy(self) -> bool:
        return self._wanted is not None or self._copying is not None

    def _tell_waiting(self) -> None:
        done, total = self._bytes
        why = f"; failed so far: {self._failed}" if self._failed else ""
        log.info(
            "copies       waiting for that of step %s: %.1f of %.1f MB%s",
            self._wanted if self._copying is None else self._copying, done / 1e6, total / 1e6, why,
        )  # fmt: skip

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                self._copying, self._wanted = self._wanted, None
                step = self._copying
            assert step is not None
            start = time.monotonic()
            try:
                self._copy(step)
            except Exception as error:  # of whatever kind, training goes on
                self._note_failure(step, error)
            else:
                self._note_copied(step, time.monotonic() - start)

    def _copy(self, step: int) -> None:
        checkpoints = self._run.checkpoints
        refuse_another_run(self._to, self._identities)
        self._to.put_run(self._run.folder, self._job)
        self._to.put_checkpoint(checkpoints / folder_name(step), self._note_bytes)
        best = files.best_so_far(checkpoints)
        if best is not None and best["step"] != step:
            self._to.put_checkpoint(checkpoints / folder_name(best["step"]))
        self._to.put_best(checkpoints)
        recorded = read_best(checkpoints)
        kept = folder_name(recorded["step"]) if recorded is not None else None
        stay = self._to.prune(folder_name(step), self._job.checkpoint.keep, kept)
        if stay and not self._told_stay:
            self._told_stay = True
            log.warning(
                "copies       copies that checkpoint.keep no longer wants cannot be removed (%s): they stay, "
                "and so may later ones, of which nothing more is said. Remove them there.",
                masked(" ".join(str(stay[0]).split())),
            )

    def _note_bytes(self, done: int, total: int) -> None:
        self._bytes = (done, total)

    def _note_copied(self, step: int, seconds: float) -> None:
        with self._changed:
            self._copying, self._copied, self._failed, self._failures = None, step, None, 0
            self._offered = {offered for offered in self._offered if offered > step}
            self._changed.notify_all()
        self._write_record()
        log.info("copies       step %d is in %s (%.1f s)", step, self._to.address, seconds)

    def _note_failure(self, step: int, error: Exception) -> None:
        """Tells why, and waits until it is worth another attempt: a newer checkpoint ends the wait."""
        with self._changed:
            self._failures += 1
            self._failed = masked(" ".join(str(error).split()) or repr(error))
            self._wanted = step if self._wanted is None else self._wanted
            self._copying = None
            wait_s = _AGAIN.wait_s(self._failures)
        self._write_record()
        log.warning(
            "copies       step %d is NOT COPIED to %s: %s. Training goes on; it is tried again in %.0f s, or "
            "with the next checkpoint.",
            step, self._to.address, self._failed, wait_s,
        )  # fmt: skip
        with self._changed:
            self._changed.wait_for(lambda: self._ends or self._wanted != step, wait_s)
            if self._ends:
                self._changed.wait(min(wait_s, _AGAIN_AT_END_S))

    def _write_record(self) -> None:
        with self._changed, suppress(OSError):  # in the order of the changes
            record: Mapping[str, Any] = {
                "to": self._to.address,
                "step": self._copied,
                "behind": len(self._offered),
                "failed": self._failed,
            }
            write_json(self._run.folder / COPIES_FILE, record)


def copier_of(
    job: Job, comm: "Comm", run: Run, identities: Sequence[RunIdentity], *, begins: bool
) -> Copier | None:
    """Collective: returns what copies the run's checkpoints on rank 0, None on others and if none shall be.

    `job` is that of the run with all its stages, `identities` are theirs, and `begins` is whether this start
    has no step. What a start before has not copied is copied now. Raises
    InputError on every rank if nothing can be written there, or if it holds another run's copies. A store
    that does not answer is told, and the run begins.
    """
    to = CopiedRun.of(job)
    if to is None:
        return None

    def check() -> None:
        try:
            check_place(job, to, identities, begins=begins)
        except StorageError as away:
            log.warning("copies       nothing can be copied now, and the run goes on: %s", away)

    of_rank_0(comm, check)
    if comm.world.rank:
        return None
    copier = Copier(job, run, to, identities)
    if step := newest_step(run.checkpoints):
        copier.offer(step)
    return copier
