"""`[timeouts]`: how long each phase of a run may last."""

from typing import Annotated

from pydantic import Field, model_validator

from trainer.config.phases import LIMIT_KEYS
from trainer.config.results import WITH_EVALUATION
from trainer.config.types import Seconds, Section

_DIAGNOSIS_S = 30.0  # seconds that the supervisors may need to find the late rank


class Timeouts(Section):
    """Seconds that a phase may last on one rank.

    Past a limit the run ends with exit code 124 and names the late rank.
    """

    init_s: Seconds = 300.0
    """Time from the start of a rank until all ranks have met and built the model or read the checkpoint."""
    first_step_s: Seconds = 600.0
    """The first step of a start, with its data: loaders start, connections are made, kernels are chosen."""
    step_s: Seconds = 300.0
    """One step, including the wait for the slowest rank, because the gradient needs all ranks."""
    data_s: Seconds = 240.0
    """The wait for the next batch."""
    eval_s: Annotated[Seconds, WITH_EVALUATION] = 1800.0
    """One evaluation."""
    checkpoint_s: Seconds = 600.0
    """The time that the loop waits for a checkpoint; also the time to save when the run is asked to stop."""
    shutdown_s: Seconds = 60.0
    """Time from the last step or checkpoint to the end of the process."""
    silence_s: Annotated[float, Field(ge=2, le=7 * 86400)] = 6.0
    """Silence after which a supervisor counts as lost, and its node with it. At 6 s all ranks end within 10 s
    of a power cut. Supervisors send one sign of life a second."""
    collective_s: Seconds | None = None
    """torch's own limit on one collective, in case the supervisors fail. None: a minute more than the longest
    of the others."""
    learned: bool | None = None
    """Learn smaller limits from the run: for a step, for the wait for data and for a wait in a collective.
    Each is six times what 99 % of the last 1,000 took, twice what 99.9 % took, or 12 s, whichever is most,
    and never above the keys here. None: if [recovery] allows restarts, since a false alarm then costs seconds
    and not the run."""

    @property
    def longest_s(self) -> float:
        """The longest time in seconds that a collective may last within its phase's limit."""
        return max(self.by_phase.values())

    @property
    def backstop_s(self) -> float:
        """The communication library's limit in seconds, later than each phase's: diagnosis comes first."""
        return self.collective_s if self.collective_s is not None else self.longest_s + 60.0

    @property
    def by_phase(self) -> dict[str, float]:
        """Seconds that each phase of `trainer.config.phases` may last."""
        return {phase: getattr(self, key) for phase, key in LIMIT_KEYS.items()}

    @model_validator(mode="after")
    def _in_order(self) -> "Timeouts":
        if self.data_s >= self.step_s:
            raise ValueError(
                f"data_s = {self.data_s:g} must be less than step_s = {self.step_s:g}: while one rank "
                "waits for its data, the others wait for it in their step"
            )
        if self.step_s > self.first_step_s:
            raise ValueError(
                f"first_step_s = {self.first_step_s:g} must be at least step_s = {self.step_s:g}: the "
                "first step does more"
            )
        if self.collective_s is not None and self.collective_s < self.longest_s + _DIAGNOSIS_S:
            name = next(name for name in type(self).model_fields if getattr(self, name) == self.longest_s)
            raise ValueError(
                f"collective_s = {self.collective_s:g} must be at least {self.longest_s + _DIAGNOSIS_S:g} "
                f"({name} and {_DIAGNOSIS_S:g} s more): otherwise torch would end the run before the "
                "supervisors have named the late rank. Without collective_s the right limit is chosen."
            )
        return self
