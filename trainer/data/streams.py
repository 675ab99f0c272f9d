"""Sources that cannot seek: `pipe:COMMAND` and standard input, read by webdataset's own reader.

What comes is what the stream gives, in its order. Nothing is read by place, so less is promised than of shards: see `PROMISES`. Imports
torch, as webdataset does.
"""

import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import Any

from torch.utils.data import get_worker_info

from trainer.data.sample import BadSample, LeftOut, RawSample, Source
from trainer.data.shards import nothing_usable, parse_captions
from trainer.data.tar import Selection
from trainer.errors import InputError
from trainer.inputs.samples import check_streams
from trainer.job import STANDARD_INPUT

PROMISES = (
    "streams cannot be read by place: the order depends on ranks and loader processes, an epoch is a number of samples and not each "
    "once, and a resumed run reads its streams from their beginning"
)
_KEPT = 1000
"""Samples that wait to be drawn from, at most: they are in memory, encoded."""


class StreamSource:
    """One rank's streams as a `Source`: `read` gives the next sample, whatever its number. Each loader process has streams of its own."""

    left_out = LeftOut()

    def __init__(self, streams: Sequence[str], samples: int, selection: Selection, window: int, seed: int) -> None:
        """`samples`: of an epoch, over all ranks."""
        self._streams, self._count, self._selection = tuple(streams), samples, selection
        self._window, self._seed = min(window, _KEPT), seed
        self._samples: Iterator[RawSample | BadSample] | None = None

    @property
    def readers(self) -> int:
        """Loader processes that have something to read, at most."""
        return len(self._streams) if STANDARD_INPUT not in self._streams else 0  # it is the rank's, not its children's

    def __len__(self) -> int:
        return self._count

    def shard_sizes(self) -> list[int]:
        return [self._count]

    def read(self, index: int) -> RawSample:  # of a protocol
        if self._samples is None:
            self._samples = self._endless()
        found = next(self._samples)
        if isinstance(found, BadSample):
            raise found
        return found

    def _endless(self) -> Iterator[RawSample | BadSample]:
        """This process's streams, one after the other, again and again. Raises InputError where a turn has no usable sample.

        A stream that cannot be read to its end is one bad sample.
        """
        worker = get_worker_info()
        own = self._streams[worker.id :: worker.num_workers] if worker else self._streams
        for turn in count():
            usable, endings, damaged = 0, Counter[str](), []
            for sample in self._turn(own, turn):
                if isinstance(sample, BadSample):
                    damaged.append(sample)
                    yield sample
                else:
                    endings.update(key for key in sample if not key.startswith("__"))
                    found = self._raw(sample)
                    usable += isinstance(found, RawSample)
                    yield found
            if damaged and (STANDARD_INPUT in own or not usable):
                raise InputError(damaged[0])
            if STANDARD_INPUT in own:
                raise InputError(_ended(usable))
            if not usable:
                raise InputError(nothing_usable(own[0], endings, self._selection, "captions"))

    def _turn(self, own: Sequence[str], turn: int) -> Iterator[dict[str, Any] | BadSample]:
        """webdataset's dictionaries, shuffled within the window; after those of a stream that ends in an error, what is wrong with it."""
        import webdataset

        problems: list[str] = []

        def readable(samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            try:
                yield from samples
            except (OSError, EOFError, ValueError, tarfile.TarError) as error:  # in front of the shuffling, which would lose what it holds
                problems.append(f"the stream cannot be read: {' '.join(str(error).split())}")

        random = Random(f"{self._seed} {turn}")
        stages = [webdataset.tarfile_to_samples(), readable]
        if self._window > 1:
            stages.append(webdataset.shuffle(self._window, initial=self._window, rng=random))
        for stream in own:
            yield from webdataset.DataPipeline(webdataset.SimpleShardList([stream]), *stages)
            yield from (BadSample(stream, "", "damaged stream", problem) for problem in problems)
            problems.clear()

    def _raw(self, sample: Mapping[str, Any]) -> RawSample | BadSample:
        key, stream = str(sample["__key__"]), str(sample["__url__"])
        image = next((sample[ending] for ending in self._selection.images if ending in sample), None)
        text = sample.get(self._selection.text)
        if image is None or text is None:
            return BadSample(stream, key, "image or caption missing", f"it has {', '.join(name for name in sample if name[:2] != '__')}")
        try:
            return RawSample(key, stream, image, parse_captions(text))
        except ValueError as error:
            return BadSample(stream, key, "bad captions", str(error))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_samples": None}


def _ended(usable: int) -> str:
    return f"{STANDARD_INPUT}: standard input ended after {usable} samples, and cannot be read again: send more, or ask for fewer steps"


def open_streams(streams: Sequence[str], samples: int, selection: Selection, window: int, seed: int, rank: int, ranks: int) -> StreamSource:
    """This rank's share of the streams. Raises InputError, on all ranks alike, where there are fewer streams than ranks."""
    check_streams(streams, ranks)
    return StreamSource(streams[rank::ranks], samples, selection, window, seed)


def loader_processes(source: Source, wanted: int) -> int:
    """No more than have something to read."""
    return min(wanted, source.readers) if isinstance(source, StreamSource) else wanted
