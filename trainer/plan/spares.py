"""Text about spare nodes: how many nodes a job needs for them, and where a run has none. Imports no torch."""

from collections.abc import Iterator

from trainer.config import Job
from trainer.text.wording import many


def with_spares(job: Job) -> str:
    """Returns the end of a sentence about the nodes that train, "" for a job without spare nodes."""
    spares = job.recovery.spare_nodes
    if not spares:
        return ""
    return f", and {many(spares, 'spare node')} (recovery.spare_nodes): {_all(job)} in all"


def no_spares(job: Job, *, local: bool) -> Iterator[str]:
    """Yields a sentence if nothing allocates the spare nodes of a job, on this machine if it is `local`."""
    if job.recovery.spare_nodes and (local or not job.schedulers):
        why = (
            "but a run on this machine has 1 node and no spare"
            if local
            else "and no scheduler of this job allocates nodes"
        )
        yield f"recovery.spare_nodes = {job.recovery.spare_nodes}, {why}: {_where(job)}"


def _where(job: Job) -> str:
    names = " or ".join(f"[{name}]" for name in job.schedulers)
    return (
        f"name {_all(job)} with --hosts, of which the last "
        f"{'is a spare' if job.recovery.spare_nodes == 1 else f'{job.recovery.spare_nodes} are spares'}"
        + (f", or submit the job: {names} asks for as many" if names else "")
    )


def _all(job: Job) -> str:
    return many(job.resources.nodes + job.recovery.spare_nodes, "node")
