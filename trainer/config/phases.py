"""Table of a run's phases: names in heartbeats and messages, and keys of [timeouts] that limit them.

Imports no pydantic: supervisors read it.
"""

from typing import Literal

Phase = Literal["init", "first step", "step", "data", "evaluation", "checkpoint", "shutdown"]

LIMIT_KEYS: dict[str, str] = {
    "init": "init_s",
    "first step": "first_step_s",
    "step": "step_s",
    "data": "data_s",
    "evaluation": "eval_s",
    "checkpoint": "checkpoint_s",
    "shutdown": "shutdown_s",
}
"""Key of [timeouts] by phase."""

Stage = Literal["loading torch", "connecting", "data index", "building model", "preflight", "restoring state"]
"""Names of what a rank does in the phase init, in this order."""

NOTHING_DONE: tuple[Phase, ...] = ("init", "first step")
"""Phases in which a start has done nothing yet that could be saved."""
SAVING: tuple[Phase, ...] = ("checkpoint", "shutdown")
"""Phases in which a rank that was asked to stop saves and leaves."""
SILENT: tuple[Phase, ...] = ("init", "first step", "evaluation", "checkpoint")
"""Phases in which a living run may write nothing to its folder."""
