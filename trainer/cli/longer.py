"""The option --longer: a run goes on beyond the length of its job file. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.errors import InputError
from trainer.run.layout import JOB_FILE
from trainer.text.pattern import pattern
from trainer.text.terminal import say
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.config import Job

_FORM = pattern(r"(steps|epochs)=([1-9][0-9]{0,11})")


def _read(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Returns the changes to the job; none without the option."""
    if text is None:
        return ()
    form = _FORM.fullmatch(text.replace("_", "").replace(",", ""))
    if form is None:
        raise InputError(
            f"--longer {text}: give the new length of the whole run, as steps=20000 or epochs=40"
        )
    unit, number = form.groups()
    other = "epochs" if unit == "steps" else "steps"
    return f"optim.{other}=", f"optim.{unit}={number}", "checkpoint.longer=true"


longer_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--longer",
    metavar="steps=N",
    callback=_read,
    help="Go on to this length of the whole run, also if the run is done; steps=N or epochs=N.",
)


def say_what_changes(job: "Job", folder: Path, samples: int | None) -> None:
    """Says to which step the run in the folder goes on now, and what the learning rate does.

    Raises InputError if there is no such run, or if it is as long already.
    """
    from trainer.config.batch_plan import schedule
    from trainer.config.learning_rate import learning_rate
    from trainer.config.loader import load_job

    if not (folder / JOB_FILE).is_file():
        raise InputError(
            f"--longer goes on with a run, and {folder} has none: set optim.steps in the job file"
        )
    if samples is None:
        return
    before, now = schedule(load_job(folder / JOB_FILE), samples).steps, schedule(job, samples).steps
    if now <= before:
        raise InputError(
            f"--longer: the run in {folder} has {many(before, 'step')} already; {now:,} are not more"
        )
    old, new = (learning_rate(job.optim, before - 1, steps) for steps in (before, now))
    say(
        f"the run goes on to step {now:,} in place of {before:,}; its learning rate follows the longer curve "
        f"from the next step on: at step {before:,} it is {new:.3g}, where it was {old:.3g}"
    )
