"""Reads pictures below a folder, within limits for files from strangers. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.files import read_file
from trainer.data.pictures import MOST_PIXELS, decode
from trainer.data.sample import MOST_BYTES, RawSample, check_file
from trainer.text.terminal import one_line

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class PictureFolder:
    """A folder with the limits of its pictures."""

    path: Path
    most_bytes: int = MOST_BYTES
    """Largest picture file."""
    most_pixels: int = MOST_PIXELS

    def decoded(self, name: str) -> "Image.Image":
        """Returns the picture at this path below the folder, in RGB. Raises InputError, such as BadSample."""
        key, origin = one_line(name), str(self.path)
        content = read_file(
            self.path / name, key, lambda status: check_file(origin, key, status, self.most_bytes), ()
        )
        return decode(RawSample(key, origin, content, ()), self.most_pixels)
