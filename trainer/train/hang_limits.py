"""Decides whether a rank learns limits from its own steps. Imports no torch."""

from collections.abc import Mapping

from trainer.config import Job
from trainer.world.launchers import World
from trainer.world.learned_limits import LEARNED_LIMITS, LimitLearner


def limit_learner(job: Job, world: World, env: Mapping[str, str]) -> LimitLearner | None:
    """Returns what learns the limits of this rank; None if the job's own limits hold."""
    asked = job.timeouts.learned
    if not (asked if asked is not None else job.recovery.max_restarts > 0):
        return None
    period = max(job.logging.every_steps, job.comm.check_replicas_steps)
    return LimitLearner(job.timeouts.by_phase, period, world.size, env.get(LEARNED_LIMITS, ""))
