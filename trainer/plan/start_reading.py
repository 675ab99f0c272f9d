"""Line of `clipship check` about what a start reads before its first step. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from trainer.config import Job, is_remote
from trainer.config.batch_plan import BatchPlan
from trainer.data.reading_plan import CONNECTIONS, first_batch
from trainer.data.sample_counts import ANSWER_S, within
from trainer.data.shard_names import expand_shards
from trainer.plan.disk import in_gb
from trainer.text.live import seconds
from trainer.text.wording import many


def start_rows(
    job: Job, batch_plan: BatchPlan, begun: Mapping[str, Any] | None, samples: int | None
) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the line about the index and the first batch of shards.

    The arguments are those of `reading_rows`. Times are estimated by some requests from this machine.
    """
    batch = first_batch(job, batch_plan, begun, samples)
    if batch is None or not find_spec("numpy"):
        return
    from trainer.data.distributed_index import index_of_run  # imports numpy
    from trainer.data.index import unindexed
    from trainer.data.index_reading import Speed
    from trainer.data.shards import shard_selection

    shards, selection = expand_shards(job.data.train), shard_selection(job.data)
    _, missing = index_of_run(job, shards, lambda folder: unindexed(shards, selection, folder))
    speed = within(ANSWER_S, lambda: Speed.of(shards[0])) if is_remote(shards[0]) else None
    index = _index(missing, job, batch_plan.world_size, speed) if missing else "the index is there"
    size = f"up to {in_gb(batch.size)} in " if batch.size else "in "
    took = speed and batch.size and speed.seconds(batch.requests, batch.size, CONNECTIONS)
    yield (
        "start",
        f"{index}; the first batch {size}{many(batch.requests, 'request')} of each rank{_about(took)}",
    )


def _index(missing: Sequence[str], job: Job, ranks: int, speed: Any) -> str:
    """Returns what is read for the index."""
    from trainer.data.index_reading import index_reading
    from trainer.data.shards import shard_selection

    what = f"the headers of {many(len(missing), 'shard')} for the index"
    far = is_remote(missing[0])
    if far and speed is None:
        return f"{what}, and their storage does not answer from here"
    found = within(ANSWER_S, lambda: index_reading(missing, shard_selection(job.data), ranks, speed))
    if found is None:
        return what
    on = f"{_about(found.seconds)} on {many(ranks, 'rank')}"
    if not far:
        return f"{what}{on}"
    read = f"{in_gb(round(found.read_bytes))} of {in_gb(round(found.total_bytes))}"
    return f"{what}: {read} in {many(round(found.requests), 'request')}{on}"


def _about(time_s: float | None) -> str:
    return f", about {seconds(max(1.0, time_s))}" if time_s else ""
