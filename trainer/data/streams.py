"""Sources that cannot seek: `pipe:COMMAND` and standard input, opened and shuffled by webdataset.

Samples come in the stream's own order. Nothing is read by offset, so less is promised than for shards: see
`PROMISES`. This module imports torch, as webdataset does.
"""

import bz2
import errno
import gzip
import io
import lzma
import zlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, count, islice
from random import Random
from typing import Any, BinaryIO, cast

from torch.utils.data import get_worker_info

from trainer.config import STANDARD_INPUT
from trainer.data.captions import LINES, CaptionReader, bad_captions
from trainer.data.files import persistent
from trainer.data.sample import MOST_BYTES, BadSample, LeftOut, RawSample, Source, check_bytes
from trainer.data.sample_counts import check_streams
from trainer.data.shards import nothing_usable
from trainer.data.tar import (
    Flaw,
    Member,
    Members,
    Selection,
    apart,
    grouped,
    halves_of,
    judged_group,
    with_contents,
)
from trainer.errors import InputError, StorageError
from trainer.text.wording import many

_DAMAGES = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""Exceptions that reading a damaged stream raises."""
_UNPACKED = {b"\x1f\x8b": gzip.GzipFile, b"BZh": bz2.BZ2File, b"\xfd7zXZ": lzma.LZMAFile}
_SKIPPED_AT_ONCE = 2**20
_MOST_AGAIN = 2**16
"""Largest number of bytes of a read that can be read again."""


class StreamMembers:
    """Yields the members of the tars in a stream, with the content of those that are wanted.

    A member is wanted if its ending is in `wanted` and it has at most `most_bytes` bytes. webdataset's own
    reader, and tarfile's for pipes, read each member whole and unpack whatever a block of compressed bytes
    holds.
    """

    def __init__(self, stream: BinaryIO, *, wanted: Collection[str], most_bytes: int) -> None:
        self._stream, self._wanted, self._most_bytes = stream, wanted, most_bytes
        self.damage = ""
        """Reason why there are no more members; empty at the stream's proper end.

        It is set after the last member.
        """

    def __iter__(self) -> Iterator[Member]:
        try:
            file = _Forward(_unpacked(self._stream))
            members = Members(file)
            yield from with_contents(members, file, self._wanted_bytes)
            self.damage = members.damage
        except _DAMAGES as error:
            self.damage = " ".join(str(error).split())

    def _wanted_bytes(self, member: Member) -> int:
        return member.size if member.ending in self._wanted and member.size <= self._most_bytes else 0


def _unpacked(stream: BinaryIO) -> BinaryIO:
    """Returns the stream, unpacked if its first bytes say that it is compressed.

    It never unpacks more than is asked for.
    """
    buffered = io.BufferedReader(_Raw(stream))
    start = buffered.peek(8)
    unpack = next((unpack for signature, unpack in _UNPACKED.items() if start.startswith(signature)), None)
    return cast(
        BinaryIO,
        gzip.GzipFile(fileobj=buffered)
        if unpack is gzip.GzipFile
        else unpack(buffered)
        if unpack
        else buffered,
    )


class _Raw(io.RawIOBase):
    """Wraps a stream that only has `read`, as the pipes of webdataset do."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        content = self._stream.read(len(into))
        into[: len(content)] = content
        return len(content)


class _Forward:
    """Counts the bytes that are read; `seek` reads on to a later place, or goes back within the last read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._at = file, 0
        self._last = self._again = b""
        """Bytes that were read last, and those that are read again."""

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        content, self._again = self._again[:size], self._again[size:]
        if len(content) < size:
            content += self._file.read(size - len(content))
        self._at += len(content)
        self._last = content if len(content) <= _MOST_AGAIN else b""
        return content

    def seek(self, place: int) -> int:
        if 0 < (back := self._at - place) <= len(self._last):
            self._again, self._last = self._last[-back:] + self._again, b""
            self._at = place
        while self._at < place and self.read(min(_SKIPPED_AT_ONCE, place - self._at)):
            pass
        return self._at


PROMISES = (
    "streams can be read only from their beginning: the order of samples depends on the numbers of ranks and "
    "loader processes, an epoch may lack samples or repeat them, and a resumed run starts its streams again"
)
_NO_FAILURES = (0, 141, -13)
"""Exit codes of a command that ended well, or wrote on when nobody read it any more (SIGPIPE)."""
_KEYS = 100_000
"""Largest number of keys whose other half may still come: some 20 MB."""


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
        self._window, self._seed = window, seed
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

        A stream that cannot be read to its end is one bad sample. Raises an error for a stream that has
        never given a usable sample, and if a whole turn has none: StorageError if a command failed, else
        InputError.
        """
        worker = get_worker_info()
        own = self._streams[worker.id :: worker.num_workers] if worker else self._streams
        gave: set[str] = set()
        for turn in count():
            yield from self._turn(own, gave, Random(f"{self._seed} {turn}"))

    def _turn(
        self, streams: Sequence[str], gave: set[str], random: Random
    ) -> Iterator[RawSample | BadSample]:
        """Yields the samples of each stream once; `gave` has the streams that have given a usable one."""
        usable, problem = 0, InputError()
        for stream in streams:
            try:
                content, samples = self._opened(stream)
            except StorageError as error:
                if stream not in gave:
                    raise
                problem = error
                yield BadSample(stream, "", "damaged stream", str(error).removeprefix(f"{stream}: "))
                continue
            for sample in _shuffled(samples, self._window, random):
                if isinstance(sample, RawSample):
                    usable += 1
                    gave.add(stream)
                yield sample
            if content.damage:
                yield content.damage
            if stream == STANDARD_INPUT:
                raise InputError(content.damage or _ended(usable))
            problem = content.problem()
            if stream not in gave:
                raise problem
        if not usable:
            raise problem

    def _opened(self, stream: str) -> tuple["_Content", Iterator[RawSample | BadSample]]:
        """Opens a stream, and again after some waits while its command fails before it gives a sample."""

        def opened() -> tuple[_Content, Iterator[RawSample | BadSample]]:
            content = _Content(stream, self._selection, self._most_bytes, self._captions)
            samples = iter(content)
            first = list(islice(samples, 1))
            if not first and content.failure:
                raise OSError(errno.EIO, content.failure)
            return content, chain(first, samples)

        return persistent(stream, opened)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_samples": None}


class _Content:
    """The samples of one stream, usable or bad, read once."""

    def __init__(self, stream: str, selection: Selection, most_bytes: int, captions: CaptionReader) -> None:
        self._stream, self._selection = stream, selection
        self._most_bytes, self._captions = most_bytes, captions
        self._endings: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._halves: OrderedDict[str, str] = OrderedDict()
        """Causes of the last keys that have an image or a text alone."""
        self.damage: BadSample | None = None
        """Says why the stream could not be read to its end; set after the last sample."""
        self.failure = ""
        """Says how its command failed; set after the last sample."""

    def __iter__(self) -> Iterator[RawSample | BadSample]:
        from webdataset.gopen import gopen, set_options

        wanted = {ending.lower() for ending in (*self._selection.images, self._selection.text)}
        pipe = gopen(self._stream)
        set_options(pipe, ignore_errors=True)  # else what a command wrote before it failed is lost
        members = StreamMembers(pipe, wanted=wanted, most_bytes=self._most_bytes)
        for key, group in grouped(members):
            found = judged_group(key, group, self._selection)
            self._endings.update(found.endings)
            for flaw in found.flaws:
                # The missing member may be behind the damage.
                if (not members.damage or flaw.key != key) and not self._is_second_half(flaw):
                    self._left_out[flaw.cause] += 1
                    yield BadSample(self._stream, flaw.key, flaw.cause, flaw.cause)
            if found.image is not None and found.text is not None:
                yield self._sample(key, found.image, found.text)
        self.failure = _failure(pipe)
        if problem := "; ".join(filter(None, (members.damage, self.failure))):
            text = f"the stream cannot be read: {problem}"
            self.damage = BadSample(self._stream, "", "damaged stream", text)

    def _is_second_half(self, flaw: Flaw) -> bool:
        """Returns whether the other half of the sample came before, and counts the two as one sample."""
        if flaw.cause not in halves_of(self._selection):
            return False
        if (before := self._halves.setdefault(flaw.key, flaw.cause)) != flaw.cause:
            if before != (cause := apart(self._selection)):
                self._left_out.update({before: -1, cause: 1})
                self._halves[flaw.key] = cause
            return True
        if len(self._halves) > _KEYS:
            self._halves.popitem(last=False)
        return False

    def _sample(self, key: str, image: Member, text: Member) -> RawSample | BadSample:
        try:
            for member in (image, text):
                check_bytes(self._stream, key, f".{member.ending}", member.size, self._most_bytes)
            captions = self._captions(text.content or b"")
            return RawSample(
                key, self._stream, image.content or b"", captions.texts, caption_counts=captions.counts
            )
        except BadSample as error:
            return error
        except ValueError as error:
            return bad_captions(self._stream, key, error)

    def problem(self) -> InputError:
        """Returns the error of a stream without a usable sample; a later start may do better if it failed."""
        text = nothing_usable(self._stream, self._endings, self._left_out, self._selection, "captions")
        return (StorageError if self.failure else InputError)(self.damage or text)


def _failure(pipe: Any) -> str:
    """Closes the stream; returns how the command that made it failed, empty if it did not or is none."""
    if not hasattr(pipe, "proc"):
        return ""
    pipe.close()
    return "" if pipe.status in _NO_FAILURES else f"its command ended with exit code {pipe.status}"


def _shuffled(
    samples: Iterator[RawSample | BadSample], window: int, random: Random
) -> Iterator[RawSample | BadSample]:
    import webdataset

    if window == 1:
        return samples
    shuffled: Iterator[RawSample | BadSample] = webdataset.shuffle(window, initial=window, rng=random)(
        samples
    )
    return shuffled


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
