"""`[timeouts]`: how long each phase of a run may last."""

from pydantic import model_validator

from trainer.job.fields import Seconds, Section

_DIAGNOSIS_S = 30.0  # the supervisors need some seconds to find out who is late


class Timeouts(Section):
    """Seconds that a phase may last on one rank. Past one the run ends with exit code 124 and says which rank was late."""

    init_s: Seconds = 300.0
    """From the start of a rank until all have met and built the model, or read the checkpoint."""
    first_step_s: Seconds = 600.0
    """The first step of a start, its data included: loaders start, connections are made, kernels chosen."""
    step_s: Seconds = 300.0
    """A step: also the wait for the slowest rank, for the gradient needs all."""
    data_s: Seconds = 240.0
    """The wait for the next batch."""
    eval_s: Seconds = 1800.0
    """One evaluation."""
    checkpoint_s: Seconds = 600.0
    """What the loop waits for a checkpoint; also the time to save when the run is asked to stop."""
    shutdown_s: Seconds = 60.0
    """Between the last step or checkpoint and the end of the process."""
    silence_s: Seconds = 6.0
    """A supervisor that says nothing for so long counts as gone, and its node with it. At 6 s all end within 10 s of a power cut."""
    collective_s: Seconds | None = None
    """torch's own limit on one collective, should the supervisors fail. None: a minute more than the longest of the others."""

    @property
    def longest_s(self) -> float:
        """The longest that one collective may last because a phase does."""
        return max(self.init_s, self.first_step_s, self.step_s, self.eval_s, self.checkpoint_s, self.shutdown_s)

    @property
    def backstop_s(self) -> float:
        """The limit that a communication library gets: later than every phase's, so that the diagnosis comes first."""
        return self.collective_s if self.collective_s is not None else self.longest_s + 60.0

    @property
    def by_phase(self) -> dict[str, float]:
        """The limits under the names of `trainer.health.pulse.Phase`."""
        return {
            "init": self.init_s,
            "first step": self.first_step_s,
            "step": self.step_s,
            "data": self.data_s,
            "evaluation": self.eval_s,
            "checkpoint": self.checkpoint_s,
            "shutdown": self.shutdown_s,
        }

    @model_validator(mode="after")
    def _in_order(self) -> "Timeouts":
        if self.data_s >= self.step_s:
            raise ValueError(
                f"data_s = {self.data_s:g} must be less than step_s = {self.step_s:g}: while one rank waits for its data, "
                f"the others wait for it in their step"
            )
        if self.step_s > self.first_step_s:
            raise ValueError(f"first_step_s = {self.first_step_s:g} must be at least step_s = {self.step_s:g}: the first step does more")
        if self.collective_s is not None and self.collective_s < self.longest_s + _DIAGNOSIS_S:
            name = next(name for name in type(self).model_fields if getattr(self, name) == self.longest_s)
            raise ValueError(
                f"collective_s = {self.collective_s:g} must be at least {self.longest_s + _DIAGNOSIS_S:g}, "
                f"{name} and {_DIAGNOSIS_S:g} s more: a collective lasts as long as the phase that it waits in, "
                f"and torch ends the run without naming the late rank. "
                f"Leave it out to have it follow"
            )
        return self
