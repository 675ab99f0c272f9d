"""`[health]`: checks before a run begins and while it runs, in addition to the limits of `[timeouts]`."""

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.keys import OnlyIf
from trainer.config.types import Positive, Seconds, Section

_WITH_PREFLIGHT = OnlyIf(lambda job: job.health.preflight, "health.preflight is false")
_IF_STEPS_ARE_LEFT_OUT = OnlyIf(
    lambda job: job.health.non_finite != "stop" or job.model.precision == "fp16",
    'health.non_finite = "stop" ends the run at the first such step',
)


class Health(Section):
    """Signs of a problem, and the reaction to each."""

    preflight: bool = True
    """Check nodes, collectives and the network before the first step. `clipship doctor` does only this."""
    preflight_s: Annotated[Seconds, _WITH_PREFLIGHT] = 20.0
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
    non_finite_in_a_row: Annotated[Positive, _IF_STEPS_ARE_LEFT_OUT] = 20
    """Number of consecutive steps left out, with skip or by the gradient scaler, that ends the run."""
