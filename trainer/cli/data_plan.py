"""What `clipship check` says of the first samples of the training data. Imports no torch."""

from collections.abc import Iterator
from importlib.util import find_spec

from trainer.config import Job, is_remote
from trainer.data.shard_names import expand_shards


def data_warnings(job: Job) -> Iterator[str]:
    """Yields a sentence for samples at the begin of the training data that are lost, or cut."""
    if job.data.kind != "webdataset" or job.data.streams or not find_spec("numpy"):
        return
    shard = expand_shards(job.data.train)[0]
    if not is_remote(shard):
        from trainer.data.first_look import left_out_first  # imports numpy

        yield from filter(None, [left_out_first(shard, job.data)])
