"""The retrieval board: a few images with the texts that a model finds nearest, for people to look at.

No torch. `retrieval_board.json` in a run folder is a list of `{"image": PNG in base64, "texts": [...],
"scores": [...], "own": [...], "caption": "...", "place": 1}`: the texts, nearest first, the similarity of
each to the image, and whether it is one of the image's own captions; then the nearest of these and its place.
"""

import base64
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.safe_io.atomic import write_json

if TYPE_CHECKING:
    from PIL import Image

BOARD_FILE = "retrieval_board.json"

_SIDE = 224


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
    return [row for entry in entries if (row := _row(entry)) is not None]


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
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        columns = zip(entry["texts"], entry["scores"], entry["own"], strict=True)
        texts = [Text(str(text), float(score), own is True) for text, score, own in columns]
        return BoardRow(str(entry["image"]), texts, str(entry["caption"]), int(entry["place"]))
    return None
