"""Line of `clipship check` about what a start reads before its first step. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainer.config import Job, is_remote
from trainer.config.batch_plan import BatchPlan
from trainer.config.formats import FORMATS
from trainer.data.formats import READERS
from trainer.data.reading_plan import CONNECTIONS, FirstBatch
from trainer.data.sample_counts import ANSWER_S, within
from trainer.data.shard_names import expand_shards
from trainer.plan.disk import in_gb
from trainer.text.live import seconds
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.data.index_reading import Speed, StartReading


def start_rows(
    job: Job, batch_plan: BatchPlan, begun: Mapping[str, Any] | None, samples: int | None
) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the line about the index and the first batch of shards and Parquet files.

    The arguments are those of `reading_rows`. Times are estimated by some requests from this machine.
    """
    data = job.data
    if data.streams or "read_ahead_mb" not in FORMATS[data.kind].reads or not find_spec("numpy"):
        return
    from trainer.data.distributed_index import index_of_run  # imports numpy
    from trainer.data.index import unindexed
    from trainer.data.index_reading import Speed
    from trainer.data.source import selection_of

    files, selection = expand_shards(data.train), selection_of(data)
    assert selection is not None
    reading = READERS[data.kind].start_reading(files, job)
    _, missing = index_of_run(job, files, lambda folder: unindexed(files, selection, folder))
    speed = within(ANSWER_S, lambda: Speed.of(files[0])) if is_remote(files[0]) else None
    parts = [_index(reading, missing, job, batch_plan.world_size, speed) if missing else "the index is there"]
    if batch := within(ANSWER_S, lambda: reading.first_batch(batch_plan, begun, samples)):
        parts.append(_batch(batch, speed))
    yield "start", "; ".join(parts)


def _batch(batch: FirstBatch, speed: "Speed | None") -> str:
    """Returns what is read for the first batch."""
    size = f"up to {in_gb(batch.size)} in " if batch.size else "in "
    took = speed and batch.size and speed.seconds(batch.requests, batch.size, CONNECTIONS)
    return f"the first batch {size}{many(batch.requests, 'request')} of each rank{_about(took)}"


def _index(
    reading: "StartReading", missing: Sequence[str], job: Job, ranks: int, speed: "Speed | None"
) -> str:
    """Returns what is read for the index."""
    unit = FORMATS[job.data.kind].unit
    what = f"the {reading.what} of {many(len(missing), unit)} for the index"
    far = is_remote(missing[0])
    if far and speed is None:
        return f"{what}, and their storage does not answer from here"
    found = within(ANSWER_S, lambda: reading.index(missing, ranks, speed))
    if found is None:
        return what
    on = f"{_about(found.seconds)} on {many(ranks, 'rank')}" if found.seconds else ""
    if not far:
        return f"{what}{on}"
    read = f"{in_gb(round(found.read_bytes))} of {in_gb(round(found.total_bytes))}"
    return f"{what}: {read} in {many(round(found.requests), 'request')}{on}"


def _about(time_s: float | None) -> str:
    return f", about {seconds(max(1.0, time_s))}" if time_s else ""
