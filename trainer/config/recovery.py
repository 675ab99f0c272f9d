"""`[recovery]`: what happens when a rank dies or hangs while the run goes on."""

from typing import Annotated

from pydantic import Field

from trainer.config.types import NonNegative, Section


class Recovery(Section):
    """Restarts of the ranks within one start of the run: no new job, the launcher and the nodes stay.

    A rank that dies, or that passes a limit of [timeouts], then no longer ends the run. All ranks are ended
    and started again, and go on from the newest checkpoint. Bad input, a request to stop, a lost node, and a
    failure before the first step still end the run.
    """

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts before the run ends with the fault. The count begins anew once a newer checkpoint is saved. 0:
    the first fault ends the run. Horovod can restart only where horovodrun starts its ranks, and not over
    MPI."""
    same_fault_limit: Annotated[int, Field(ge=2)] = 2
    """End the run if the same rank fails at the same step for the same cause this many times in a row: that
    looks like a bug, and a restart does not help."""
    backoff_s: NonNegative = 5.0
    """Wait before a restart if no checkpoint was saved since the restart before it. The wait doubles with
    each further restart, up to eight times this value; a random part, up to half, is left out."""
