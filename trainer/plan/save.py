"""Text of `clipship check` about saving: how long it takes once a run is asked to stop, how often is best."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from trainer.comm.backends import keeps_in_memory
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.config.sections import SECTIONS
from trainer.estimate.architecture import planned_architecture
from trainer.estimate.size import checkpoint_bytes
from trainer.estimate.step_speed import step_speed
from trainer.report.folder import RunFacts, has_started, read_run
from trainer.report.wording import span
from trainer.run.folder import run_folder
from trainer.telemetry.goodput import account, usual_step_s
from trainer.text.wording import in_gb, many

ASSUMED_BYTES_S = 250e6
"""Bytes a second at which a checkpoint is assumed to be written: a network file system that others use too.

A run that has written checkpoints knows better, and its own time is taken.
"""
NOTICE_S = 30.0
"""Seconds between warning and end that are common: spot instances of Google Cloud and Azure have them, and so
has `scancel` on a Slurm with the default KillWait.
"""
_STEPS = 2
"""Steps until the ranks save: the one under way, and the one in which they tell each other of the request."""

_NODE_MTBF_S = 5000 * 3600.0
"""Assumed mean time between two faults of one node; Llama 3's training had one in 6,300 h (arXiv 2407.21783).
"""
_WAIT_S = 1.0
"""Seconds for which training is assumed to wait at a checkpoint."""

NOTICES: Mapping[str, Callable[[Job], float | None]] = {
    "slurm.signal_lead_s": lambda job: job.slurm.signal_lead_s,
    "kubernetes.grace_s": lambda job: job.kubernetes.grace_s,
    "timeouts.checkpoint_s": lambda job: job.timeouts.checkpoint_s,
}
"""Keys that say how many seconds a run has after a request to stop; None for one that says nothing."""


@dataclass(frozen=True)
class SaveTime:
    """Seconds that the ranks need after a request to stop, until their checkpoint is on disk."""

    write_s: float
    write: str
    """Source of `write_s`, in words."""
    step_s: float | None
    """Seconds of one step; None if they are not known."""
    step: str
    wait_s: float | None = None
    """Seconds for which training waited at a checkpoint; None if no run has measured it."""

    @property
    def seconds(self) -> float:
        """Seconds in all; without the steps where these are not known."""
        return self.write_s + _STEPS * (self.step_s or 0.0)

    def total(self) -> str:
        """Returns the seconds in all, in words."""
        return f"{'at least' if self.step_s is None else 'about'} {span(self.seconds)}"

    def parts(self) -> str:
        """Returns what the seconds are for."""
        steps = ", whose time is not known yet"
        if self.step_s is not None:
            steps = f" of {span(self.step_s)} ({self.step})"
        return f"{_STEPS} steps{steps}, and {self.write}"


def save_time(job: Job, batch_plan: BatchPlan, *, files: bool = True) -> SaveTime | None:
    """Returns the time, measured where the run has saved before; None if the model's size is not known.

    `files` lets the run folder be read.
    """
    facts = _facts_of(job) if files else None
    written = [] if facts is None else [event.get("write_s") for event in facts.metrics.checkpoints]
    measured = [seconds for seconds in written if isinstance(seconds, int | float)]
    size = checkpoint_bytes(job)
    if measured:
        write_s = statistics.median(measured)
        write = f"{span(write_s)} for a checkpoint (measured)"
    elif size is not None:
        write_s = size.total / ASSUMED_BYTES_S
        write = f"{in_gb(size.total)} at {ASSUMED_BYTES_S / 1e9:g} GB/s (assumed)"
    else:
        return None
    step_s, wait_s = (None, None) if facts is None else (usual_step_s(facts.times), _waited_s(facts))
    if step_s is not None:
        return SaveTime(write_s, write, step_s, "measured", wait_s)
    return SaveTime(write_s, write, _estimated_step_s(job, batch_plan), "estimated", wait_s)


def _facts_of(job: Job) -> RunFacts | None:
    folder = run_folder(job)
    return read_run(folder, recent=True) if has_started(folder) else None


def _waited_s(facts: RunFacts) -> float | None:
    """Returns the seconds for which training waited at each checkpoint of a run; None if it made none."""
    saves = sum(its.saves for its in facts.times)
    return account(facts.times).lost_s["checkpoint"] / saves if saves else None


def _estimated_step_s(job: Job, batch_plan: BatchPlan) -> float | None:
    shape, gpu = planned_architecture(job.model), job.resources.known_gpu
    if shape is None or gpu is None or not job.asks_for_gpus:
        return None
    return batch_plan.batch_size_per_rank / step_speed(shape, job, batch_plan, gpu).samples_s


def save_rows(save: SaveTime | None) -> Iterator[tuple[str, str]]:
    """Yields the row about a request to stop."""
    if save is not None:
        yield "stop", f"{save.total()} from a request to the saved checkpoint: {save.parts()}"


def interval_rows(job: Job, save: SaveTime | None) -> Iterator[tuple[str, str]]:
    """Yields the row about the best time between checkpoints: sqrt(2 C M) (Young, CACM 17(9), 1974).

    C is the wait at a checkpoint and M the mean time between two faults. There is no row for ranks that keep
    their steps in memory: few faults send them back to a checkpoint.
    """
    if save is None or keeps_in_memory(job):
        return
    nodes, wait_s = job.resources.nodes, save.wait_s or _WAIT_S
    best_s = math.sqrt(2 * wait_s * _NODE_MTBF_S / nodes)
    fails = (
        f"{'its node' if nodes == 1 else f'each of {nodes} nodes'} fails once in {_NODE_MTBF_S / 3600:,.0f} h"
    )
    waits = f"training waits {span(wait_s)} ({'measured' if save.wait_s else 'assumed'})"
    every = many(max(1, round(best_s / 60)), "minute")
    best = f"a checkpoint every {every} loses the least time (Young/Daly), if {fails} (assumed)"
    yield "interval", f"{best} and {waits} for a checkpoint; {_saves(job, save.step_s)}"


def _saves(job: Job, step_s: float | None) -> str:
    """Returns when the job saves, in words."""
    minutes, steps = job.checkpoint.every_minutes, job.checkpoint.every_steps
    every = [] if minutes is None else [span(60 * minutes)]
    if steps is not None:
        every.append(many(steps, "step") + ("" if step_s is None else f" ({span(steps * step_s)})"))
    return f"this job saves every {' and every '.join(every)}" if every else "this job saves at its end alone"


def too_little_notice(job: Job, save: SaveTime | None) -> Iterator[str]:
    """Yields a sentence for each time between a warning and the end that is too short for a checkpoint."""
    if save is None:
        return
    takes = f"after a request to stop the ranks save for {save.total()} ({save.parts()})"
    for key, notice in NOTICES.items():
        section, seconds = key.partition(".")[0], notice(job)
        if section in SECTIONS.keys() - job.schedulers.keys() or seconds is None:
            continue
        if seconds < save.seconds:
            yield f"{takes}, longer than {key} = {seconds:g}: raise it to {math.ceil(save.seconds)} or more"
    if job.schedulers and save.seconds > NOTICE_S:
        yield (
            f"{takes}, longer than the {NOTICE_S:g} s of warning that scancel and spot instances mostly "
            f"give: {_then(job)}"
        )


def _then(job: Job) -> str:
    if keeps_in_memory(job) and (job.recovery.spare_nodes or job.recovery.min_nodes):
        return "if only some nodes are taken, the others go on from the step in their memory"
    return "such an end costs the steps since the last checkpoint, which checkpoint.every_minutes bounds"
