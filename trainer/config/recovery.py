"""`[timeouts]`, `[health]` and `[recovery]`: limits of phases, signs of a problem, restarts after a fault."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.keys import OnlyIf
from trainer.config.phases import LIMIT_KEYS
from trainer.config.results import WITH_EVALUATION
from trainer.config.types import NonNegative, Positive, Seconds, Section

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


_WITH_RESTARTS = OnlyIf(
    lambda job: job.recovery.max_restarts > 0, "recovery.max_restarts is 0, so the first fault ends the run"
)
_IN_MEMORY = OnlyIf(lambda job: job.recovery.keep_in_memory, "recovery.keep_in_memory = false keeps no step")


class Recovery(Section):
    """Restarts of the ranks within one start of the run: no new job, the launcher and the nodes stay.

    A rank that dies, or that passes a limit of [timeouts], then no longer ends the run. All ranks are ended
    and started again, and go on from the newest step that a node has in memory. Bad input, a request to stop,
    and a failure before the first step still end the run. So does a lost node, unless a spare node or fewer
    ranks can take its place.
    """

    max_restarts: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Restarts before the run ends with the fault. The count begins anew once a newer checkpoint is saved. 0:
    the first fault ends the run. Over MPI, which ends all ranks when one is gone, mpirun or srun starts all
    of them again, on the same nodes."""
    same_fault_limit: Annotated[int, Field(ge=2), _WITH_RESTARTS] = 2
    """End the run if the same rank fails at the same step for the same cause this many times in a row: that
    looks like a bug, and a restart does not help."""
    backoff_s: Annotated[NonNegative, _WITH_RESTARTS] = 5.0
    """Wait before a restart if no new step was done, and no checkpoint saved, since the restart before it.
    The wait doubles with each further one, up to eight times this value; a random part, up to half, is left
    out."""
    keep_in_memory: Annotated[bool, _WITH_RESTARTS] = True
    """Keep the newest step in the memory of each node, so that a restart repeats at most one step and reads
    no checkpoint. Only used with max_restarts above 0. It takes twice the size of weights and optimizer state
    in each node's /dev/shm; `clipship check` says how much. If keeping every step would cost more than 2 % of
    the time, only every k-th step is kept. false: restarts begin at the newest checkpoint on disk."""
    keep_every_steps: Annotated[Positive | None, _WITH_RESTARTS, _IN_MEMORY] = None
    """Keep every so many steps in memory, whatever it costs; a restart repeats at most as many. None: every
    step, or every k-th, so that it costs at most 2 % of the time; the log says k after ten steps."""
    spare_nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that are allocated beside resources.nodes and compute nothing until one of those is lost, has
    failed twice or fails the preflight; then a spare takes its place. Needs max_restarts above 0."""
    min_nodes: Positive | None = None
    """Go on with fewer ranks if nodes are lost and no spare is left, down to the ranks of this many nodes.
    The global batch stays the same, so the number of ranks must divide it. Lost nodes that come back are
    used again. None: never fewer ranks than resources.nodes has."""

    @model_validator(mode="after")
    def _restarts_for_nodes(self) -> "Recovery":
        if self.max_restarts == 0:
            if self.spare_nodes:
                raise ValueError(
                    f"spare_nodes = {self.spare_nodes} needs max_restarts above 0: a spare node serves only "
                    "when the ranks start again"
                )
            if self.min_nodes is not None:
                raise ValueError(
                    f"min_nodes = {self.min_nodes} needs max_restarts above 0: the first fault ends the run"
                )
        return self


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
