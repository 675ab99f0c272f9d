"""`[health]`: what a run looks at, before it begins and while it goes on, beside the limits of `[timeouts]`."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.job.fields import Positive, Seconds, Section


class Health(Section):
    """What counts as sick, and what then happens."""

    preflight: bool = True
    """Look at nodes, collectives and the wire before the first step. `clipship doctor` does it alone."""
    preflight_s: Seconds = 20.0
    """Seconds that measuring may take; what does not fit is left out, and the table says so."""
    same_environment: Literal["error", "warn", "off"] = "error"
    """At the start all ranks compare versions, device, code, job and variables, and in an image torch, CUDA and NCCL with what it was
    proven with. error: differences end the run, and are named."""
    slow_rank_factor: Annotated[float, Field(gt=1, le=100)] | None = 1.5
    """A rank whose own work (waiting left out) takes so many times the ranks' median, for 10 steps, is named. None: nobody looks."""
    non_finite: Literal["stop", "skip"] = "stop"
    """A gradient that is no number, or infinite. stop: end the run and record the step's samples; skip: leave the step's update out.
    With fp16 such steps are the scaler's to skip."""
    non_finite_in_a_row: Positive = 20
    """So many left out one after another end the run all the same."""
