"""Best checkpoint of a run: the record of it, and its name for users, RUN/best. Imports no torch."""

import os
from pathlib import Path
from typing import Any

from trainer.run.layout import CHECKPOINTS
from trainer.safe_io.plain import read_json

BEST = "best.json"
BEST_NAME = "best"
"""Last part of a path that stands for the best checkpoint of the run folder before it."""


def folder_name(step: int) -> str:
    """Returns the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step of a checkpoint's folder; None for each other name, such as that of a user's copy."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and name == folder_name(int(digits)) else None


def step_folders(checkpoints: Path) -> dict[int, Path]:
    """Returns the checkpoint folders by their steps, oldest first, complete or broken.

    Whatever else lies there is the user's: it is neither read nor touched.
    """
    steps = ((step_of(path.name), path) for path in checkpoints.glob("step-*"))
    return dict(sorted((step, path) for step, path in steps if step is not None and path.is_dir()))


def read_best(checkpoints: Path) -> dict[str, Any] | None:
    """Returns the recorded step, metric and value; None if none is recorded."""
    path = checkpoints / BEST
    try:
        best = read_json(path, links=True) if path.exists() else None
    except (OSError, ValueError, RecursionError):
        return None
    whole = (
        isinstance(best, dict)
        and isinstance(best.get("step"), int)
        and isinstance(best.get("metric"), str)
        and isinstance(best.get("value"), int | float)
    )
    return best if whole else None


def best_folder(given: Path) -> Path | None:
    """Returns the checkpoint that RUN/best stands for; None if the path is another or none is recorded."""
    if given.name != BEST_NAME or os.path.exists(given):
        return None
    checkpoints = given.parent / CHECKPOINTS
    best = read_best(checkpoints)
    folder = best and checkpoints / folder_name(best["step"])
    return folder if folder and folder.is_dir() else None
