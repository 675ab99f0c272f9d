"""Decodes images to RGB as a viewer shows them: turned as EXIF says, transparent parts white by default.

XMP says how an image is turned if EXIF does not, as Pillow has it.
Any format works that Pillow reads without starting another program; an image that cannot be decoded is a
`BadSample`.
"""

import io
import math
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from trainer.config import Data
from trainer.data.reading import TALLY, Reading
from trainer.data.sample import BadSample, RawSample
from trainer.text.wording import many

# data.max_image_pixels is the limit of all decoders, of which Pillow's own one knows nothing. What Pillow
# says of odd metadata helps nobody in a log of many ranks.
Image.MAX_IMAGE_PIXELS = None
warnings.filterwarnings("ignore", module=r"PIL\.")

MOST_PIXELS = 50_000_000
"""Largest number of pixels of a picture; a larger one counts as an attack on memory.

A decoded pixel takes three bytes and more.
"""
LONGER = 16
"""Ratio of the sides of a picture from which an evaluation resizes only its middle."""
Result = TypeVar("Result")
# Samples come from strangers, so PostScript is left out: Pillow would hand it to Ghostscript.
ORIENTATION = 0x0112
"""EXIF tag that says how a viewer turns an image."""
_WIDTH, _HEIGHT = 0x0100, 0x0101
_ASIDE = (5, 6, 7, 8)
"""Orientations that swap width and height."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Turns that a viewer makes, by the values of that tag."""
_STARTS = {b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n\x1a\n": "png"}
"""Endings by the first bytes of a file."""
DECODER_ERRORS = (
    OSError, ValueError, SyntaxError, EOFError, ArithmeticError, MemoryError, TypeError, LookupError,
    AttributeError, struct.error
)  # fmt: skip
"""Errors that Pillow raises for files that are damaged or cut, or whose metadata are odd."""
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000")


class Decoding(NamedTuple):
    """Settings of `[data]` for decoding."""

    most_pixels: int = MOST_PIXELS
    transparency: Literal["white", "drop_alpha"] = "white"

    @classmethod
    def by(cls, data: Data) -> "Decoding":
        return cls(data.max_image_pixels, data.transparency)


AS_SHOWN = Decoding()


def decode(raw: RawSample, decoding: Decoding = AS_SHOWN) -> Image.Image:
    """Returns the sample's picture in RGB; one with transparent parts is counted.

    Raises BadSample, which names shard, key and cause, if it cannot be decoded.
    """
    if not isinstance(raw.image, bytes):
        return Image.fromarray(raw.image)
    try:
        with Image.open(io.BytesIO(raw.image), formats=formats()) as picture:
            check_size(raw, picture.width, picture.height, decoding.most_pixels)
            TALLY.add(Reading(transparent=int(picture.has_transparency_data)))
            white = decoding.transparency == "white"
            return to_rgb(_upright(picture), known_depth=picture.format == "PPM", white=white)
    except UnidentifiedImageError as error:
        content = f"{many(len(raw.image), 'byte')} that begin with {raw.image[:12]!r}"
        raise BadSample(
            raw.origin, raw.key, "not an image", f"the image has an unknown format: {content}"
        ) from error
    except DECODER_ERRORS as error:
        raise BadSample(
            raw.origin, raw.key, "damaged image", f"the image cannot be decoded: {error}"
        ) from error


def _upright(picture: Image.Image) -> Image.Image:
    """Returns the picture, turned as its metadata say.

    Pillow's own function also writes the metadata anew, and fails where these are odd.
    """
    picture.load()  # which turns a TIFF
    method = _TURNS.get(orientation(picture))
    return picture if method is None else picture.transpose(method)


def orientation(picture: Image.Image) -> int:
    """Returns a value of the tag, 1 where there is none. Damaged metadata are no reason to lose an image."""
    try:
        found = picture.getexif().get(ORIENTATION, 1)
        return int(found) if found in _TURNS else 1
    except Exception:  # Pillow raises any, by the kind of damage
        return 1


def shown_size(picture: Image.Image) -> tuple[int, int]:
    """Returns width and height of a picture that is open and not decoded, as a viewer shows it."""
    tags = getattr(picture, "tag_v2", {})  # of a TIFF, whose size is turned already, by Pillow's version
    width, height = tags.get(_WIDTH, picture.width), tags.get(_HEIGHT, picture.height)
    return (height, width) if orientation(picture) in _ASIDE else (width, height)


@dataclass(frozen=True)
class OfMiddle(Generic[Result]):
    """A transform that resizes the shorter side and keeps the middle, of pictures of any shape.

    Of a picture that is very long it gets the part around the middle: resized whole, one of 2 x 20,000 pixels
    would take gigabytes, of which nearly all is cut off.
    """

    transform: Callable[[Image.Image], Result]
    longer: float = LONGER
    """Largest ratio of the sides of what the transform gets."""

    def __call__(self, picture: Image.Image) -> Result:
        most = math.ceil(min(picture.size) * self.longer)
        left, top = ((edge - min(edge, most)) // 2 for edge in picture.size)
        if left or top:
            picture = picture.crop((left, top, picture.width - left, picture.height - top))
        return self.transform(picture)


def format_of_bytes(content: bytes) -> str:
    """Returns the usual ending of an image file with this content; empty if it is of no common format."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return next((ending for start, ending in _STARTS.items() if content.startswith(start)), "")


def check_size(raw: RawSample, width: int, height: int, most_pixels: int) -> None:
    """Raises BadSample if the header announces more pixels than allowed; nothing has been decoded yet."""
    if width * height > most_pixels:
        what = f"the image has {width} x {height} pixels; data.max_image_pixels allows {most_pixels:,}"
        raise BadSample(raw.origin, raw.key, "too many pixels", what)


def to_rgb(picture: Image.Image, *, known_depth: bool = False, white: bool = True) -> Image.Image:
    """Returns the picture in RGB, 8 bits per channel.

    Deeper grey is scaled, not clipped. Transparent parts show white, or without `white` the colours that lie
    there. `known_depth` means that 32-bit integers hold 16 bits, as Pillow makes them of PGM files.
    """
    if picture.mode.startswith("I"):
        grey = np.asarray(picture)
        bits = 16 if picture.mode != "I" or known_depth else _bits(grey)
        return Image.fromarray((grey.clip(0, 2**bits - 1) >> (bits - 8)).astype(np.uint8)).convert("RGB")
    if white and picture.has_transparency_data:
        seen = picture.convert("RGBA")
        behind = Image.new("RGBA", seen.size, "white")
        return Image.alpha_composite(behind, seen).convert("RGB")
    return picture.convert("RGB")


def _bits(grey: NDArray[np.int32]) -> int:
    """Returns how many bits the values in 32-bit integers were made of, since no header says.

    The answer is 8 or 16 if these hold the largest value, else the number of bits that it needs.
    """
    needed = int(grey.max(initial=0)).bit_length()
    return next((bits for bits in (8, 16) if needed <= bits), needed)


@lru_cache
def formats() -> tuple[str, ...]:
    """Returns the formats that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)
