"""Sources that cannot seek: `pipe:COMMAND` and standard input, opened, grouped and shuffled by webdataset.

Samples come in the stream's own order. Nothing is read by offset, so less is promised than for shards: see
`PROMISES`. This module imports torch, as webdataset does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any

from torch.utils.data import get_worker_info

from trainer.config import STANDARD_INPUT
from trainer.data.captions import LINES, CaptionReader
from trainer.data.sample import MOST_BYTES, BadSample, LeftOut, RawSample, Source, check_bytes
from trainer.data.sample_counts import check_streams
from trainer.data.shards import nothing_usable
from trainer.data.stream_tar import DAMAGES, members
from trainer.data.tar import Selection
from trainer.errors import InputError
from trainer.text.wording import many

PROMISES = (
    "streams can be read only from their beginning: the order of samples depends on the numbers of ranks and "
    "loader processes, an epoch may lack samples or repeat them, and a resumed run starts its streams again"
)
_KEPT = 1000
"""Largest number of samples that wait to be drawn; they are in memory, encoded."""


class StreamSource:
    """One rank's streams as a `Source`: `read` returns the next sample, whatever its number.

    Each loader process has streams of its own.
    """

    left_out = LeftOut()

    def __init__(
        self,
        streams: Sequence[str],
        samples: int,
        selection: Selection,
        window: int,
        seed: int,
        most_bytes: int = MOST_BYTES,
        captions: CaptionReader = LINES,
    ) -> None:
        """`samples` is the epoch's, over all ranks; `most_bytes` limits each member that is read."""
        self._streams, self._count, self._selection, self._most_bytes = (
            tuple(streams),
            samples,
            selection,
            most_bytes,
        )
        self._captions = captions
        self._window, self._seed = min(window, _KEPT), seed
        self._samples: Iterator[RawSample | BadSample] | None = None

    @property
    def readers(self) -> int:
        """Largest number of loader processes that have something to read."""
        # Standard input is the rank's and cannot be read by its children.
        return len(self._streams) if STANDARD_INPUT not in self._streams else 0

    def __len__(self) -> int:
        return self._count

    def shard_sizes(self) -> list[int]:
        return [self._count]

    def read(self, index: int) -> RawSample:  # the signature is the protocol's
        if self._samples is None:
            self._samples = self._endless()
        sample = next(self._samples)
        if isinstance(sample, BadSample):
            raise sample
        return sample

    def _endless(self) -> Iterator[RawSample | BadSample]:
        """Yields the samples of this process's streams, one stream after the other, again and again.

        A stream that cannot be read to its end is one bad sample. Raises InputError if a whole turn has no
        usable sample.
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
                    raw = self._raw(sample)
                    usable += isinstance(raw, RawSample)
                    yield raw
            if damaged and (STANDARD_INPUT in own or not usable):
                raise InputError(damaged[0])
            if STANDARD_INPUT in own:
                raise InputError(_ended(usable))
            if not usable:
                raise InputError(nothing_usable(own[0], endings, self._selection, "captions"))

    def _turn(self, own: Sequence[str], turn: int) -> Iterator[dict[str, Any] | BadSample]:
        """Yields webdataset's dictionaries, shuffled within the window.

        After those of a stream that ends in an error comes a BadSample that says what is wrong with it.
        """
        import webdataset
        from webdataset.tariterators import group_by_keys, url_opener

        problems: list[str] = []

        def readable(samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            try:
                yield from samples
            except DAMAGES as error:  # before the shuffling, which would lose the samples that it holds
                problems.append(f"the stream cannot be read: {' '.join(str(error).split())}")

        random = Random(f"{self._seed} {turn}")
        wanted = {ending.lower() for ending in (*self._selection.images, self._selection.text)}
        stages = [
            url_opener,
            partial(members, wanted=wanted, most_bytes=self._most_bytes),
            group_by_keys,
            readable,
        ]
        if self._window > 1:
            stages.append(webdataset.shuffle(self._window, initial=self._window, rng=random))
        for stream in own:
            yield from webdataset.DataPipeline(webdataset.SimpleShardList([stream]), *stages)
            yield from (BadSample(stream, "", "damaged stream", problem) for problem in problems)
            problems.clear()

    def _raw(self, sample: Mapping[str, Any]) -> RawSample | BadSample:
        key, stream = str(sample["__key__"]), str(sample["__url__"])
        names = [
            next((ending for ending in self._selection.images if ending in sample), ""),
            self._selection.text,
        ]
        image, text = (sample.get(name) for name in names)
        if image is None or text is None:
            return BadSample(
                stream,
                key,
                "image or caption missing",
                f"it has {', '.join(name for name in sample if name[:2] != '__')}",
            )
        try:
            for name, content in zip(names, (image, text), strict=True):
                if isinstance(content, int):
                    check_bytes(stream, key, f".{name}", content, self._most_bytes)
            captions = self._captions(text)
            return RawSample(key, stream, image, captions.texts, caption_counts=captions.counts)
        except BadSample as error:
            return error
        except ValueError as error:
            return BadSample(stream, key, "bad captions", str(error))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_samples": None}


def _ended(usable: int) -> str:
    return (
        f"{STANDARD_INPUT}: standard input ended after {many(usable, 'sample')} and cannot be read again: "
        "send more, or train for fewer steps"
    )


def open_streams(
    streams: Sequence[str],
    samples: int,
    selection: Selection,
    window: int,
    seed: int,
    rank: int,
    ranks: int,
    most_bytes: int = MOST_BYTES,
    captions: CaptionReader = LINES,
) -> StreamSource:
    """Returns this rank's share of the streams.

    Raises InputError, on all ranks alike, if there are fewer streams than ranks.
    """
    check_streams(streams, ranks)
    return StreamSource(streams[rank::ranks], samples, selection, window, seed, most_bytes, captions)


def loader_processes(source: Source, wanted: int) -> int:
    """Returns the number of loader processes, at most as many as have something to read."""
    return min(wanted, source.readers) if isinstance(source, StreamSource) else wanted
