"""The retrieval board: a few images with the texts that a model finds nearest, for people to look at.

No torch. `retrieval_board.json` in a run folder is a list of `{"image": PNG in base64, "texts": [...],
"scores": [...], "own": [...], "caption": "...", "place": 1}`: the texts, nearest first, the similarity of
each to the image, and whether it is one of the image's own captions; then the nearest of these and its place.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.safe_io.atomic import write_json

if TYPE_CHECKING:
    from PIL import Image

BOARD_FILE = "retrieval_board.json"

_SIDE = 224
_ROWS = 48
_TEXTS = 10
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Text:
    """One of the texts that were found for an image."""

    text: str
    score: float
    """Similarity to the image; a larger one is nearer."""
    own: bool
    """True if it is one of the image's own captions."""


@dataclass(frozen=True)
class BoardRow:
    """One image of the board."""

    image: str
    """The image as PNG in base64."""
    texts: Sequence[Text]
    """The texts, nearest first."""
    caption: str = ""
    """The nearest of the image's own captions."""
    place: int = 0
    """Place of that caption among all texts, from 1; 0 if it is not known."""


def row(image: "Image.Image", texts: Sequence[Text], caption: str = "", place: int = 0) -> BoardRow:
    """Returns the row of a picture, which is scaled down if it is larger than the board shows it."""
    small = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    png = BytesIO()
    small.save(png, "PNG")
    return BoardRow(base64.b64encode(png.getvalue()).decode(), texts, caption, place)


def write_board(run_folder: Path, rows: Sequence[BoardRow]) -> None:
    """Replaces the run's board, whole or not at all, with the rows of the last evaluation.

    Rank 0 calls it.
    """
    write_json(run_folder / BOARD_FILE, [_to_json(row) for row in rows])


def read_rows(entries: Sequence[Any]) -> list[BoardRow]:
    """Returns the rows of a board file's list that have the right format; the others are left out."""
    return [row for entry in entries[:_ROWS] if (row := _row(entry)) is not None]


def _to_json(row: BoardRow) -> dict[str, Any]:
    return {
        "image": row.image,
        "texts": [text.text for text in row.texts],
        "scores": [text.score for text in row.texts],
        "own": [text.own for text in row.texts],
        "caption": row.caption,
        "place": row.place,
    }


def _row(entry: Any) -> BoardRow | None:
    if not isinstance(entry, dict) or not _is_png(entry.get("image")):
        return None
    columns = [entry.get(name) for name in ("texts", "scores", "own")]
    if not all(isinstance(column, list) for column in columns):
        return None
    texts = [
        Text(text, float(score), own is True)
        for text, score, own in zip(*columns, strict=False)
        if isinstance(text, str) and isinstance(score, (int, float))
    ]
    caption, place = entry.get("caption"), entry.get("place")
    known = isinstance(caption, str) and type(place) is int
    return BoardRow(entry["image"], texts[:_TEXTS], *((caption, place) if known else ()))


def _is_png(image: object) -> bool:
    try:
        return isinstance(image, str) and base64.b64decode(image, validate=True).startswith(_PNG)
    except (binascii.Error, ValueError):
        return False
