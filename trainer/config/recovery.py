"""`[recovery]`: what happens when a rank dies or hangs, or a node is lost, while the run goes on."""

from typing import Annotated

from pydantic import Field, model_validator

from trainer.config.keys import OnlyIf
from trainer.config.types import NonNegative, Positive, Section

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
