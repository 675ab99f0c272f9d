"""WebDataset shards as a source: samples are read by their offset in the file. No torch.

The offsets come from an index on disk or in memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from trainer.config import Data, is_remote
from trainer.data.arena import Arena
from trainer.data.bad_samples import WHOLE, Allowed, NothingUsable
from trainer.data.blocks import Block, BlockReader, gap_bytes
from trainer.data.captions import LINES, CaptionReader, bad_captions
from trainer.data.files import Files
from trainer.data.groups import NO_GROUP
from trainer.data.index import Index, raise_all
from trainer.data.indexed import filtered_of, index_in_memory, left_out_of
from trainer.data.recent import Recent
from trainer.data.sample import (
    MOST_BYTES,
    BadSample,
    LeftOut,
    Numbering,
    RawSample,
    all_filtered,
    check_bytes,
)
from trainer.data.scores import scores_of
from trainer.data.tar import Rows, Selection, apart, halves_of
from trainer.errors import InputError, StorageError
from trainer.text.wording import many

_MOST_DIGITS = 7
"""Digits of the largest class number: figures of classes are arrays of as many."""
Meaning = Literal["captions", "label"]
"""Kind of content of a sample's text member."""

KEYS_OF_JOB = {
    "captions": "data.image_key and data.caption_key",
    "label": "data.image_key and eval.class_key",
}
MAPPED_ROWS = 256
"""Number of shards whose rows a process keeps mapped: more than a window touches, and bounded."""
ONE_READ = 2**16
"""Largest gap in bytes between image and text that are read at once: on a network a second read costs more.

A larger image in a local file is read on its own, since a second call costs less than to copy it.
"""


class Place(NamedTuple):
    """Places of a sample's members in its file, and how far from there they lie in the arena."""

    path: str
    key: str
    image_at: int
    image_size: int
    text_at: int
    text_size: int
    shift: int | None = None
    """Number to add to a place in the file for that in the arena; None: it is read from the file."""
    group: int = NO_GROUP
    """Number of the sample's group."""

    @property
    def span(self) -> tuple[int, int]:
        """Places in the file where the sample begins and ends."""
        begin = min(self.image_at, self.text_at)
        return begin, max(self.image_at + self.image_size, self.text_at + self.text_size)


class ShardSource:
    """Source of the samples of several shards."""

    keep_bytes = 0

    def __init__(
        self,
        index: Index,
        selection: Selection,
        meaning: Meaning,
        most_bytes: int = MOST_BYTES,
        captions: CaptionReader = LINES,
    ) -> None:
        self.index, self._selection = index, selection
        self._meaning = meaning
        self._captions = captions
        self._most_bytes = most_bytes
        self._numbering = Numbering(self.shard_sizes())
        self._files = Files()
        self._rows: Recent[int, Rows] = Recent(MAPPED_ROWS)
        self.reader = BlockReader(index)

    @cached_property
    def left_out(self) -> LeftOut:
        return left_out_of(self.index)

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [len(entry) for entry in self.index.entries]

    def read(self, index: int) -> RawSample:
        return self.read_at(self.places(index, 1)[0])

    def places(self, first: int, count: int) -> list[Place]:
        """Returns the places of consecutive samples of one shard."""
        number, row = self._numbering.locate(first)
        path, rows = self.index.paths[number], self._rows.get(number, lambda: self.index.rows(number))
        return [
            Place(path, rows.key(at), image_at, image_size, text_at, text_size, group=rows.group(at))
            for at, (image_at, image_size, text_at, text_size, _) in enumerate(
                rows.places[row : row + count].tolist(), row
            )
        ]

    def block_of(self, first: int, count: int) -> tuple[int, int]:
        """Returns the same samples: nothing else is read with them."""
        return first, count

    def read_block(self, first: int, count: int, arena: Arena) -> Block:
        """Reads consecutive samples of one shard into the arena. Raises as `BlockReader.bytes_of` does."""
        places = self.places(first, count)
        ranges, size = [], 0
        for numbers in self._near(places):
            begin = min(places[number].span[0] for number in numbers)
            end = max(places[number].span[1] for number in numbers)
            content = self.reader.bytes_of(places[numbers[0]].path, begin, end)
            size += len(content)
            kept = arena.put(content)
            ranges.append(kept)
            for number in numbers:
                places[number] = places[number]._replace(shift=kept.place - begin)
        return Block(places, ranges, size)

    def _near(self, places: Sequence[Place]) -> Iterator[list[int]]:
        """Yields the numbers of samples that are read together, in the order of the file."""
        numbers: list[int] = []
        reached = 0
        for number in sorted(range(len(places)), key=lambda number: places[number].span):
            place = places[number]
            if max(place.image_size, place.text_size) > self._most_bytes:  # it is not read at all
                continue
            begin, end = place.span
            if numbers and begin - reached > gap_bytes(place.path):
                yield numbers
                numbers, reached = [], 0
            numbers.append(number)
            reached = max(reached, end)
        if numbers:
            yield numbers

    def read_at(self, place: Place, arena: Arena | None = None) -> RawSample:
        """Returns the sample at a place, from the arena if it lies there. Raises as `read` does."""
        path, key = place.path, place.key
        check_bytes(path, key, "image", place.image_size, self._most_bytes)
        check_bytes(path, key, f".{self._selection.text}", place.text_size, self._most_bytes)
        if arena is not None and place.shift is not None:
            image = arena.read(place.image_at + place.shift, place.image_size)
            text = arena.read(place.text_at + place.shift, place.text_size)
        else:
            try:
                image, text = self._both(path, *place[2:6])
            except InputError as error:
                kind = StorageError if isinstance(error, StorageError) else InputError
                raise kind(f"{error} (reading sample {key})") from error
        try:
            if self._meaning == "label":
                return RawSample(key, path, image, (), parse_label(text))
            texts, counts = self._captions(text)
            return RawSample(key, path, image, texts, caption_counts=counts, group=place.group)
        except ValueError as error:
            if self._meaning == "label":
                raise BadSample(path, key, "bad label", str(error)) from error
            raise bad_captions(path, key, error) from error

    def _both(
        self, path: str, image_at: int, image_size: int, text_at: int, text_size: int
    ) -> tuple[bytes, bytes]:
        """Returns image and text, with one read if they are near each other."""
        begin, end = min(image_at, text_at), max(image_at + image_size, text_at + text_size)
        copied = 0 if is_remote(path) else image_size
        if max(copied, end - begin - image_size - text_size) > ONE_READ:
            return self._files.read(path, image_at, image_size), self._files.read(path, text_at, text_size)
        span = self._files.read(path, begin, end - begin)
        image_at, text_at = image_at - begin, text_at - begin
        return span[image_at : image_at + image_size], span[text_at : text_at + text_size]

    def __getstate__(self) -> dict[str, object]:
        # `left_out` is long, and is computed again where it is needed.
        return {name: value for name, value in self.__dict__.items() if name != "left_out"}


def shard_selection(data: Data) -> Selection:
    """Returns the members of shards that the job reads, and its filters: one of READERS."""
    ending, scores = data.caption_keys.ending, scores_of(data)
    return Selection(tuple(data.image_key), ending, data.filters, scores, data.group_by)


def open_shards(
    paths: Sequence[str],
    image_endings: Sequence[str],
    text_ending: str,
    meaning: Meaning,
    progress: Callable[[int, int], None] | None = None,
    allowed: Allowed = WHOLE,
    most_bytes: int = MOST_BYTES,
    captions: CaptionReader = LINES,
    filters: Sequence[str] = (),
) -> ShardSource:
    """Indexes the shards in memory and returns their samples.

    `progress` is called with (shards done, shards). Raises InputError, which names every bad shard, or if no
    sample is usable.
    """
    selection = Selection(tuple(image_endings), text_ending, tuple(filters))
    index = index_in_memory(paths, selection, progress)
    return open_indexed(index, selection, meaning, allowed, most_bytes, captions)


def open_indexed(
    index: Index,
    selection: Selection,
    meaning: Meaning,
    allowed: Allowed = WHOLE,
    most_bytes: int = MOST_BYTES,
    captions: CaptionReader = LINES,
) -> ShardSource:
    """Returns the samples of shards whose headers are indexed.

    A shard is opened when its first sample is read. A sample with a member of more than `most_bytes` is a
    BadSample when it is read. Raises InputError if more is wrong than allowed, or if no sample is usable:
    then it says what the shards hold.
    """
    source = ShardSource(index, selection, meaning, most_bytes, captions)
    if not allowed.damage or not len(source):
        raise_all(damages(index))
    if not len(source):
        raise NothingUsable(_nothing_usable(index, selection, meaning), source.left_out)
    allowed.check(source.left_out, len(source))
    return source


def damages(index: Index) -> list[InputError]:
    """Returns one error for each damaged shard."""
    return [
        InputError(f"{path}: {entry.damage}")
        for path, entry in zip(index.paths, index.entries, strict=True)
        if entry.damage
    ]


def parse_label(text: bytes) -> int:
    """Returns a class number from 0; raises ValueError for anything else."""
    digits = text.strip()
    if not digits.isdigit() or len(digits.lstrip(b"0")) > _MOST_DIGITS:
        raise ValueError(
            f"label must be a class number from 0 to {10**_MOST_DIGITS - 1:,}, given {text[:40]!r}"
        )
    return int(digits)


def _nothing_usable(index: Index, selection: Selection, meaning: Meaning) -> str:
    if filtered := filtered_of(index):
        return all_filtered(index.paths[0], filtered)
    endings, left_out = Counter[str](), Counter[str]()
    for entry in index.entries:
        endings.update(entry.endings)
        left_out.update(entry.left_out)
    others = f" and {many(len(index.paths) - 1, 'more shard')}" if len(index.paths) > 1 else ""
    return nothing_usable(f"{index.paths[0]}{others}", endings, left_out, selection, meaning)


def nothing_usable(
    where: str,
    endings: Mapping[str, int],
    left_out: Mapping[str, int],
    selection: Selection,
    meaning: Meaning,
    looked_at: int | None = None,
) -> str:
    """Returns a message: the members found, counted by ending, what a sample needs, and what to do.

    `left_out` counts samples by the cause for which they are not usable. `looked_at` is the number of keys
    after which reading stopped, if it did.
    """
    most = Counter(endings).most_common(12)
    listed = ", ".join(f".{ending} ({count})" if ending else f"no ending ({count})" for ending, count in most)
    images = ", ".join("." + ending for ending in selection.images)
    missing = halves_of(selection)
    advice = [f"{count} with {cause}" for cause, count in left_out.items() if cause not in missing]
    texts, pictures = selection.text.lower() in endings, {ending.lower() for ending in selection.images}
    if not advice and texts and pictures & set(endings):
        advice.append(f"no sample has both in one tar; {apart(selection)}")
    if looked_at is not None and len(set(missing) & set(left_out)) == 1:
        advice.append(f"those are the first {looked_at}; if the others come later: {apart(selection)}")
    return (
        f"{where}: no usable sample. Found {listed or 'no files'}; a sample needs one of {images} and a "
        f".{selection.text}. {'; '.join(advice) or f'Set {KEYS_OF_JOB[meaning]}'}"
    )
