"""Groups of samples that are positives of each other, as `optim.positives` names them. No torch.

What a group shares becomes a number of 64 bits, which travels with each sample. In a batch of N samples two
groups have the same number with a probability below N^2 / 2^65: 3e-11 in a step of 32,768 samples, and then
one target of that step is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config.caption_key import Path
from trainer.config.losses import PositivesName
from trainer.data.captions import field_value
from trainer.data.sample import RawSample

NO_GROUP = 0
"""Number of a sample without an id."""
_EXACT = 2**53
"""Whole numbers below it are exact as floats, which tables have in place of integers if some are null."""


class Shared(NamedTuple):
    """Row of a value of optim.positives: says what the samples of a group share."""

    mark: Callable[[RawSample], bytes | None]
    """Function from a sample to bytes that it shares; None: it is in no group."""
    tokens: bool = False
    """True if the tokens of its caption count, too."""


def _nothing(raw: RawSample) -> None:
    return None


def _caption(raw: RawSample) -> bytes:
    return b""


def _image(raw: RawSample) -> bytes:
    encoded = raw.image if isinstance(raw.image, bytes) else raw.image.tobytes()
    return blake2b(encoded, digest_size=16).digest()


def _id(raw: RawSample) -> bytes | None:
    return None if raw.group == NO_GROUP else raw.group.to_bytes(8, signed=True)


SHARED: Mapping[PositivesName, Shared] = {
    "pairs": Shared(_nothing),
    "captions": Shared(_caption, tokens=True),
    "images": Shared(_image),
    "groups": Shared(_id),
}
"""Rows by the values of optim.positives."""


def group_numbers(
    positives: PositivesName,
    marks: Sequence[bytes | None],
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> NDArray[np.int64] | None:
    """Returns the number of each sample's group, int64 [samples]; None if pairs alone are positives.

    `marks` are those of the row's function, `tokens` [samples, context length]. A sample without a mark has a
    number of its position, which no other one of its global batch has.
    """
    if positives == "pairs":
        return None
    rows = tokens if SHARED[positives].tokens else tokens[:, :0]
    return np.array(
        [
            _number(position.tobytes(), alone=True) if mark is None else _number(mark + row.tobytes())
            for mark, row, position in zip(marks, rows, positions, strict=True)
        ],
        dtype=np.int64,
    )


def id_number(value: Any) -> int:
    """Returns the number of an id, and NO_GROUP for null and an empty text. Raises ValueError for others.

    White space around a text does not count.
    """
    text = id_text(value, "data.group_by").strip()
    return _number(text.encode("utf-8", "surrogatepass")) or 1 if text else NO_GROUP


def id_text(value: Any, key: str) -> str:
    """Returns an id as text, empty for null: a whole number is the same id as its digits.

    Raises ValueError, which names the key of the job that asks for ids, for anything else.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        value = int(value)
    if value is None or value != value:  # NaN stands for null in tables
        return ""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"its id in {key} is neither a text nor a whole number but {type(value).__name__}")
    return str(value)


def number_at(value: Any, path: Path) -> int:
    """Returns the number of the id at a path, NO_GROUP if there is no such field. Raises ValueError."""
    try:
        found = field_value(value, path)
    except ValueError:
        return NO_GROUP
    return id_number(found)


def _number(content: bytes, *, alone: bool = False) -> int:
    digest = blake2b(content, digest_size=8, person=b"alone" if alone else b"").digest()
    return int.from_bytes(digest, signed=True)
