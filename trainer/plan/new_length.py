"""Another length of a run than its own, which it goes on to (--longer, --shorter). Imports no torch."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainer.config import Job
from trainer.config.batch_plan import schedule
from trainer.config.learning_rate import learning_rate
from trainer.config.loader import load_job
from trainer.config.resume_rule import LENGTH
from trainer.errors import InputError
from trainer.run.checkpoints import MANIFEST, newest_whole
from trainer.run.folder import run_folder
from trainer.run.layout import JOB_FILE, Run
from trainer.safe_io.plain import read_json
from trainer.text.wording import many

_FORM = re.compile(r"(steps|epochs)=([1-9][0-9]{0,11})")


AS_LONG_AS_THE_JOB_SAYS = (
    "checkpoint.longer=",
    "checkpoint.shorter=",
    "optim.decay_from_step=",
    "optim.decay_from_lr=",
)
"""Changes that undo what the options do beside the length itself."""


class NewLength(NamedTuple):
    """Length that a run is to have."""

    option: str
    """Option that gave it: longer or shorter."""
    unit: str
    """Key of the length: steps or epochs."""
    number: str

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes to the job, without a decay that begins where the run is."""
        other = "epochs" if self.unit == "steps" else "steps"
        length = f"optim.{other}=", f"optim.{self.unit}={self.number}"
        return *length, *AS_LONG_AS_THE_JOB_SAYS, f"checkpoint.{self.option}=true"


class Lengthened(NamedTuple):
    """Changes that give a run another length, and their effect in words."""

    overrides: tuple[str, ...]
    told: str
    """A sentence: how far the run goes on now, and what its learning rate does."""


def read_length(option: str, text: str) -> NewLength:
    """Returns the length that an option's text gives. Raises InputError if it gives none."""
    form = _FORM.fullmatch(text.replace("_", "").replace(",", ""))
    if form is None:
        raise InputError(
            f"--{option} {text}: give the new length of the whole run, as steps=20000 or epochs=40"
        )
    return NewLength(option, *form.groups())


def one_length(longer: NewLength | None, shorter: NewLength | None) -> NewLength | None:
    """Returns the length that is asked for. Raises InputError if there are two."""
    if longer and shorter:
        raise InputError("give either --longer or --shorter: a run has one length")
    return longer or shorter


def with_length(job_path: Path, overrides: Sequence[str], length: NewLength) -> Lengthened:
    """Returns the job's overrides with another length for its run; one that it has already stays as it is.

    So a command that was stopped can be given again. Raises InputError if there is no such run, if it has
    gone beyond that length, or if that would be the other option's.
    """
    given, overrides = overrides, (*overrides, *length.changes)
    job = load_job(job_path, overrides)
    folder = run_folder(job)
    if job.stage:
        raise InputError(
            f"--{length.option}: a run of several stages has the lengths of its job; to train its model "
            "further, give another run model.init with its checkpoint"
        )
    if not (folder / JOB_FILE).is_file():
        raise InputError(
            f"--{length.option} goes on with a run, and {folder} has none: set optim.steps in the job file"
        )
    before = load_job(folder / JOB_FILE)
    done, samples = _reached(folder)
    old, new = (_steps(each, samples) for each in (before, job))
    if old == new and (old or before.optim.epochs == job.optim.epochs):
        has = before.optim.model_dump(exclude_none=True)
        same = (f"{key}={has.get(key.removeprefix('optim.'), '')}" for key in sorted(LENGTH))
        return Lengthened((*given, *same), f"the run in {folder} has this length already")
    if old is None or new is None:  # epochs of a run without a checkpoint, whose data nobody has counted
        _check_epochs(before, length, folder)
        verb = "goes on to" if length.option == "longer" else "ends at"
        return Lengthened(overrides, f"the run {verb} {many(int(length.number), length.unit[:-1])}")
    _check(old, new, done, length, folder)
    if length.option == "longer":
        return Lengthened(overrides, _longer_curve(before, job, done, old, new))
    return _with_decay(overrides, before, done, old, new)


def _reached(folder: Path) -> tuple[int, int | None]:
    """Returns the step of the run's newest checkpoint, 0 without one, and the samples of an epoch then."""
    newest = newest_whole(Run(folder).checkpoints)
    if newest is None:
        return 0, None
    with suppress(OSError, ValueError, KeyError, TypeError):
        return newest[0], int(read_json(newest[1] / MANIFEST, links=True)["data_samples"])
    return newest[0], None


def _steps(job: Job, samples: int | None) -> int | None:
    return job.optim.steps or (None if samples is None else schedule(job, samples).steps)


def _check_epochs(before: Job, length: NewLength, folder: Path) -> None:
    epochs, wanted = before.optim.epochs, int(length.number)
    if epochs is None or length.unit != "epochs":
        return
    if (wanted < epochs) if length.option == "longer" else (wanted > epochs):
        raise InputError(_not(length, many(epochs, "epoch"), f"{wanted:,}", folder))


def _check(old: int, new: int, done: int, length: NewLength, folder: Path) -> None:
    if (new < old) if length.option == "longer" else (new > old):
        raise InputError(_not(length, many(old, "step"), f"{new:,}", folder))
    if new <= done:
        raise InputError(
            f"--{length.option}: the run in {folder} has done {many(done, 'step')}, and {new:,} are not "
            "more: it can end only at a later one"
        )


def _not(length: NewLength, has: str, wanted: str, folder: Path) -> str:
    more, other = ("more", "--shorter") if length.option == "longer" else ("fewer", "--longer")
    return (
        f"--{length.option}: the run in {folder} has {has} already; {wanted} are not {more} "
        f"({other} is for the other way)"
    )


def _longer_curve(before: Job, job: Job, done: int, old: int, new: int) -> str:
    told = f"the run goes on to step {new:,} in place of {old:,}; its learning rate follows the longer curve"
    if not done:
        return told
    was, comes = learning_rate(before.optim, done - 1, old), learning_rate(job.optim, done, new)
    jump = f", {comes / was:.2g} times as much" if was and comes > 1.1 * was else ""
    return f"{told}: step {done + 1:,} has {comes:.3g}{jump}, after {was:.3g} in step {done:,}"


def _with_decay(overrides: tuple[str, ...], before: Job, done: int, old: int, new: int) -> Lengthened:
    told = f"the run ends at step {new:,} in place of {old:,}"
    if not done:
        return Lengthened(overrides, f"{told}; its learning rate follows the shorter curve")
    rate = learning_rate(before.optim, done, old)
    decay = f"optim.decay_from_step={done}", f"optim.decay_from_lr={rate!r}"
    falls = f"from step {done + 1:,} on its learning rate falls from {rate:.3g} to {before.optim.min_lr:.3g}"
    return Lengthened((*overrides, *decay), f"{told}; {falls}")
