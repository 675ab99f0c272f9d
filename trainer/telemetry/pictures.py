"""Pictures of an evaluation with the texts that the model finds nearest, for TensorBoard and W&B.

Needs numpy and Pillow when a strip is made. No torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from trainer.text.masking import masked
from trainer.text.terminal import one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+!|~&-])")
_GAP = 4
"""Pixels between two pictures of a strip."""
COLUMNS = ("picture", "own caption", "its place", "nearest texts")


@dataclass(frozen=True)
class Picture:
    """A picture with the texts that were found for it."""

    png: bytes
    caption: str
    """The nearest of its own captions."""
    place: int
    """Place of that caption among all texts, from 1; 0 if it is not known."""
    nearest: Sequence[tuple[str, bool]]
    """Texts, nearest first, and whether each is one of its own captions."""

    def image(self) -> "Image.Image":
        """Returns the picture as Pillow has it."""
        from PIL import Image

        return Image.open(BytesIO(self.png))


def as_markdown(pictures: Sequence[Picture]) -> str:
    """Returns a table with a line for each picture, numbered from 1; its own captions are bold."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for number, picture in enumerate(pictures, start=1):
        texts = [f"**{_cell(text)}**" if own else _cell(text) for text, own in picture.nearest]
        place = str(picture.place) if picture.place else ""
        rows.append((str(number), _cell(picture.caption), place, "; ".join(texts)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def strip(pictures: Sequence[Picture]) -> "NDArray[np.uint8]":
    """Returns the pictures beside each other on white, uint8 [height, width, 3]."""
    import numpy as np
    from PIL import Image

    images = [picture.image().convert("RGB") for picture in pictures]
    whole = Image.new(
        "RGB",
        (sum(image.width + _GAP for image in images), max(image.height for image in images)),
        "white",
    )
    at = 0
    for image in images:
        whole.paste(image, (at, 0))
        at += image.width + _GAP
    return np.asarray(whole)


def _cell(text: str) -> str:
    """Returns the text as Markdown shows it unchanged in a table's cell."""
    return _MARKDOWN.sub(r"\\\1", one_line(masked(text)))
