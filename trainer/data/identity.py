"""Tells a run's training data from others by its files: sizes, numbers of samples, scores and targets."""

from trainer.config import Data
from trainer.config.formats import FORMATS
from trainer.data.files import stamp
from trainer.data.indexed import Indexed
from trainer.data.sample import Source
from trainer.data.scores import scores_of
from trainer.data.shard_names import expand_shards
from trainer.data.targets import Targets


def data_rows(data: Data, source: Source, targets: Targets | None = None) -> list[object]:
    """Returns values that differ if the data's files do; none for data without files, and for streams.

    Names and times of change are left out: a copy, on a node's own disk for example, is the same data. So is
    what only an index says, which another release may write in another way. Raises OSError.
    """
    if isinstance(source, Indexed):
        entries = source.index.entries
        scores = scores_of(data)
        beside = [scores.identity] if scores else []
        beside += [teacher.made_by for teacher in targets.teachers] if targets else []
        return [*((entry.size, len(entry)) for entry in entries), *beside]
    if data.streams or not FORMATS[data.kind].unit:
        return []
    return [[stamp(path).size for path in expand_shards(data.train)], source.shard_sizes()]
