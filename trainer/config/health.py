"""`[health]`: checks before a run begins and while it runs, in addition to the limits of `[timeouts]`."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.types import Positive, Seconds, Section


class Health(Section):
    """Signs of a problem, and the reaction to each."""

    preflight: bool = True
    """Check nodes, collectives and the network before the first step. `clipship doctor` does only this."""
    preflight_s: Seconds = 20.0
    """Seconds that the preflight may take to measure; measurements that do not fit are left out, and its
    table says so."""
    same_environment: Literal["error", "warn", "off"] = "error"
    """At the start all ranks compare versions, device, code, job and variables; in an image, also torch, CUDA
    and NCCL with the versions that the image was verified with. error: differences end the run and are named.
    """
    slow_rank_factor: Annotated[float, Field(gt=1, le=100)] | None = 1.5
    """Name a rank whose own work, without waiting, takes this many times the median of all ranks for 10
    steps. None: off."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN or infinite gradient. stop: end the run and record the step's samples; skip: leave
    out the step's update. With fp16 the gradient scaler skips such steps itself."""
    non_finite_in_a_row: Positive = 20
    """Number of consecutive steps left out, with skip or by the gradient scaler, that ends the run."""
