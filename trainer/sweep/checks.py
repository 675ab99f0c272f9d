"""Checks every run of a sweep before the first one starts. Imports no torch."""

from collections.abc import Callable, Sequence

from trainer.errors import InputError
from trainer.sweep.trials import Trial


def refuse(trials: Sequence[Trial], check: Callable[[Trial], object]) -> None:
    """Raises InputError with the problems of every run for which `check` raises it."""
    problems = []
    for trial in trials:
        try:
            check(trial)
        except InputError as problem:
            problems.append(f"{' '.join(trial.values)}: {problem}")
    if problems:
        raise InputError("no run was started\n" + "\n".join(problems))
