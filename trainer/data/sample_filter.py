"""Decides by the job's filters which samples of a shard are kept: by JSON and the images' headers. No torch.

It reads as little as it needs: a sample's JSON, and of an image the beginning.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from PIL import Image

from trainer.config.filters import BY_KEY, MEASURES, Filter, filter_place, parse_filter, score_column
from trainer.data.captions import MOST_JSON_BYTES, field_value, parsed_json
from trainer.data.groups import NO_GROUP, number_at
from trainer.data.pictures import DECODER_ERRORS, formats, shown_size

if TYPE_CHECKING:
    from trainer.data.scores import KeyTable

HEAD_BYTES = 2**16 - 2**12
"""Bytes of an image that are read first; the size stands in them unless long metadata come before.

With its header in the tar they make one request to far storage (`hops.LEAST_BYTES`).
"""
MOST_HEAD_BYTES = 2**24
"""Largest number of bytes of an image that are read for its size."""
NO_SIZE = "the image's header, which data.filters need, cannot be read"
"""Cause of a sample whose size does not show."""


class MemberPlace(NamedTuple):
    """Place of a member in a shard, in bytes."""

    offset: int
    size: int
    head: bytes = b""
    """Its first bytes, if they were read with its header: from far storage nothing is read twice."""


class SampleFilter:
    """The filters of a job, for the samples of shards."""

    def __init__(
        self, filters: Sequence[str], scores: "KeyTable | None" = None, group_by: str | None = None
    ) -> None:
        self._filters, self._scores = tuple(map(parse_filter, filters)), scores
        self._group_by = group_by
        fields = fields_of(self._filters, None if scores is None else scores.by) + (
            [] if group_by is None else [group_by]
        )
        self.members = frozenset(filter_place(name)[0] for name in fields)
        """Endings of the members that have fields of the filters, and the id of the group."""
        self._measures = any(each.measures for each in self._filters)

    def head_bytes(self, ending: str, size: int, images: Sequence[str]) -> int:
        """Returns how many bytes from the beginning of a member are needed as a rule; 0 for none of it."""
        if ending in self.members:
            return size if size <= MOST_JSON_BYTES else 0
        return min(size, HEAD_BYTES) if self._measures and ending in images else 0

    def failed(
        self,
        key: str,
        file: BinaryIO,
        image: MemberPlace,
        members: Mapping[str, MemberPlace],
        values: dict[str, Any],
    ) -> str | None:
        """Returns the first filter that the sample fails, as text; None if it is kept.

        JSON that is read of the sample is put into `values`, by ending. Raises ValueError as `failed_filter`,
        and OSError if reading fails.
        """
        size, field = partial(image_size, file, image), partial(_field, file, members, values)
        return failed_filter(self._filters, self._scores, key, size, field)

    def group(self, file: BinaryIO, members: Mapping[str, MemberPlace], values: dict[str, Any]) -> int:
        """Returns the number of the sample's id, as `RawSample.group` has it. Raises as `failed`."""
        ending, path = filter_place(self._group_by) if self._group_by is not None else ("", ())
        if ending not in members:
            return NO_GROUP
        return number_at(_json(file, ending, members, values, "data.group_by needs"), path)


def fields_of(filters: Sequence[Filter], by: str | None) -> list[str]:
    """Returns the names of the fields that filters compare; `by` is data.scores_by if there are scores."""
    own = [each for each in filters if not each.measures and (by is None or score_column(each.name) is None)]
    return [each.name for each in own] + ([] if by is None or by == BY_KEY else [by])


def failed_filter(
    filters: Sequence[Filter],
    scores: "KeyTable | None",
    key: str,
    size: Callable[[], tuple[int, int]],
    field: Callable[[str], object],
) -> str | None:
    """Returns the first filter that a sample fails, as text; None if it is kept.

    `size` gives width and height of its image, `field` a field by its name. Raises ValueError, in words that
    are the same for many samples, if a filter cannot be decided.
    """
    shape: tuple[int, int] | None = None
    for each in filters:
        if each.measures:
            shape = shape or size()
            found: object = float(MEASURES[each.name](*shape))
        elif scores is not None and (column := score_column(each.name)) is not None:
            found = scores.value(key if scores.by == BY_KEY else field(scores.by), column)
        else:
            found = field(each.name)
        if not each.holds(found):
            return each.text
    return None


def image_size(file: BinaryIO, image: MemberPlace) -> tuple[int, int]:
    """Returns width and height of an image as it is shown. Raises ValueError if its header cannot be read."""
    for most in (HEAD_BYTES, MOST_HEAD_BYTES):
        size = size_of(_read(file, image, most))
        if size is not None:
            return size
        if image.size <= most:
            break
    raise ValueError(NO_SIZE)


def size_of(content: bytes) -> tuple[int, int] | None:
    """Returns width and height by the beginning of an image file; None if they cannot be read."""
    try:
        with Image.open(io.BytesIO(content), formats=formats()) as picture:
            return shown_size(picture)
    except DECODER_ERRORS:
        return None


def _field(file: BinaryIO, members: Mapping[str, MemberPlace], values: dict[str, Any], name: str) -> object:
    ending, path = filter_place(name)
    if ending not in members:
        raise ValueError(f"no .{ending}, which data.filters need")
    value = _json(file, ending, members, values, "data.filters need")
    try:
        return field_value(value, path)
    except ValueError:
        raise ValueError(f"no field {name}, which data.filters need") from None


def _json(
    file: BinaryIO, ending: str, members: Mapping[str, MemberPlace], values: dict[str, Any], needed: str
) -> Any:
    """Returns the value of a JSON member, which `needed` says who needs. Raises ValueError."""
    if members[ending].size > MOST_JSON_BYTES:
        raise ValueError(f".{ending}, which {needed}, is too large")
    if ending not in values:
        try:
            values[ending] = parsed_json(_read(file, members[ending], MOST_JSON_BYTES))
        except ValueError:
            raise ValueError(f".{ending}, which {needed}, cannot be read") from None
    return values[ending]


def _read(file: BinaryIO, part: MemberPlace, most: int) -> bytes:
    size = min(part.size, most)
    if len(part.head) >= size:
        return part.head[:size]
    file.seek(part.offset)
    return file.read(size)
