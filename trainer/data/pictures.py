"""Encoded images to pictures in RGB, as a viewer shows them: turned as EXIF says, transparent parts white. No torch.

Any format that Pillow reads without starting another program; what cannot be decoded is a `BadSample`.
"""

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from trainer.data.sample import BadSample, RawSample

MOST_PIXELS = 50_000_000
"""A picture of more is taken for an attack on memory: a decoded pixel takes three bytes and more."""
# Pillow would hand PostScript to Ghostscript; samples come from strangers.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000")


def decode(raw: RawSample, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """The sample's picture in RGB; BadSample naming shard, key and cause where it cannot be decoded."""
    if not isinstance(raw.image, bytes):
        return Image.fromarray(raw.image)
    try:
        with Image.open(io.BytesIO(raw.image), formats=_formats()) as picture:
            check_size(raw, picture.width, picture.height, most_pixels)
            return to_rgb(ImageOps.exif_transpose(picture))
    except UnidentifiedImageError as error:
        found = f"{len(raw.image)} bytes that begin with {raw.image[:12]!r}"
        raise BadSample(raw.origin, raw.key, "not an image", f"the image is of no known format: {found}") from error
    except Image.DecompressionBombError as error:
        raise BadSample(raw.origin, raw.key, "too many pixels", f"the image cannot be decoded: {error}") from error
    # Decoders of damaged files raise any of these.
    except (OSError, ValueError, SyntaxError, EOFError, OverflowError, MemoryError) as error:
        raise BadSample(raw.origin, raw.key, "damaged image", f"the image cannot be decoded: {error}") from error


def check_size(raw: RawSample, width: int, height: int, most_pixels: int) -> None:
    """BadSample where the header announces more pixels than allowed: nothing has been decoded yet."""
    if width * height > most_pixels:
        what = f"the image has {width} x {height} pixels; data.max_image_pixels allows {most_pixels:,}"
        raise BadSample(raw.origin, raw.key, "too many pixels", what)


def to_rgb(picture: Image.Image) -> Image.Image:
    """8 bits a channel: 16-bit grey is scaled, not clipped, and transparent parts show white."""
    if picture.mode.startswith("I"):
        return Image.fromarray((np.asarray(picture).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        seen = picture.convert("RGBA")
        white = Image.new("RGBA", seen.size, "white")
        return Image.alpha_composite(white, seen).convert("RGB")
    return picture.convert("RGB")


@lru_cache
def _formats() -> tuple[str, ...]:
    """Those that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)
