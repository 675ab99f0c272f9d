"""Shows people what a source of samples holds: numbers, and a sheet of pictures. No torch."""

import base64
import html
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from trainer.data.caption_lengths import CaptionLengths
from trainer.data.pictures import decode
from trainer.data.sample import BadSample, RawSample, Source
from trainer.data.sheet_fonts import Fonts
from trainer.text.terminal import shown

LengthsOf = Callable[[Sequence[str]], CaptionLengths | None]
"""Function from captions to their numbers of tokens; None if these are not known here."""
TILE = 192
TEXT = 44
MARGIN = 8
LINES = 3
LETTER = 11
_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Contact sheet</title>
<style>
body {{ display: flex; flex-wrap: wrap; gap: 12px; font: 13px sans-serif; }}
figure {{ width: 192px; margin: 0; overflow-wrap: anywhere; }}
</style>
{tiles}
"""


def statistics(source: Source, samples: int, lengths_of: LengthsOf) -> dict[str, Any]:
    """Returns the number of samples, and of some of them image sizes, caption lengths and flaws."""
    bad: Counter[str] = Counter()
    sides, sizes, captions, texts = [], [], [], list[str]()
    for number in _spread(source, samples):
        try:
            raw = source.read(number)
            sides.append(decode(raw).size)
        except BadSample as error:
            bad[error.cause] += 1
            continue
        sizes.append(len(raw.image))
        captions.append(len(raw.captions))
        texts += raw.captions
    lengths = lengths_of(texts)
    shards = source.shard_sizes()
    return {
        "shards": len(shards),
        "samples": len(source),
        "samples_per_shard": _range(shards),
        "not_usable": source.left_out.every,
        "inspected": len(sides) + bad.total(),
        "bad": dict(bad),
        "width": _range([width for width, _ in sides]),
        "height": _range([height for _, height in sides]),
        "image_bytes": _range(sizes),
        "captions_per_image": _range(captions),
        "caption_characters": _range([len(text) for text in texts]),
        "caption_tokens": _range(lengths.tokens) if lengths else None,
        "context_length": lengths.most if lengths else None,
        "cut_captions": round(lengths.cut_share, 4) if lengths else None,
    }


def contact_sheet(source: Source, samples: int, fonts: Fonts | None = None) -> Image.Image:
    """Returns pictures in rows, each above the beginning of its first caption.

    A sample that cannot be decoded shows the reason. `fonts` then knows the characters that are only boxes.
    """
    fonts = fonts or Fonts(LETTER)
    numbers = list(_spread(source, samples))
    columns = max(1, round((len(numbers) * (TILE + TEXT) / TILE) ** 0.5))
    rows = -(-len(numbers) // columns)
    sheet = Image.new(
        "RGB", (columns * (TILE + MARGIN) + MARGIN, rows * (TILE + TEXT + MARGIN) + MARGIN), "white"
    )
    for place, number in enumerate(numbers):
        row, column = divmod(place, columns)
        sheet.paste(
            _tile(_shown(source, number), fonts),
            (MARGIN + column * (TILE + MARGIN), MARGIN + row * (TILE + TEXT + MARGIN)),
        )
    return sheet


def contact_page(source: Source, samples: int) -> str:
    """Returns what `contact_sheet` shows as an HTML page, which a browser draws in its own fonts."""
    tiles = (_figure(*_shown(source, number)) for number in _spread(source, samples))
    return _PAGE.format(tiles="\n".join(tiles))


def _figure(picture: Image.Image | None, text: str) -> str:
    png = BytesIO()
    if picture is not None:
        picture.save(png, "PNG")
    data = base64.b64encode(png.getvalue()).decode()
    image = f'<img alt="" src="data:image/png;base64,{data}">' if data else "<b>not usable</b>"
    return f"<figure>{image}<figcaption>{html.escape(shown(text))}</figcaption></figure>"


def _shown(source: Source, number: int) -> tuple[Image.Image | None, str]:
    """Returns a sample's picture, None if it cannot be decoded, and the text to write below."""
    try:
        raw = source.read(number)
        return _thumbnail(raw), raw.captions[0] if raw.captions else raw.key
    except BadSample as error:
        return None, f"{error.key}: {error.cause}"


def _tile(sample: tuple[Image.Image | None, str], fonts: Fonts) -> Image.Image:
    picture, text = sample
    tile = Image.new("RGB", (TILE, TILE + TEXT), "white")
    if picture is not None:
        tile.paste(picture, ((TILE - picture.width) // 2, (TILE - picture.height) // 2))
    font = fonts.of(text)
    letters = int(TILE * len(text) / max(1.0, ImageDraw.Draw(tile).textlength(text.replace("\n", " "), font)))
    lines = textwrap.wrap(text, max(4, letters), max_lines=LINES, placeholder=" ...")
    ImageDraw.Draw(tile).multiline_text(
        (0, TILE + 2), "\n".join(lines), fill="red" if picture is None else "black", font=font
    )
    return tile


def _thumbnail(raw: RawSample) -> Image.Image:
    picture = decode(raw)
    picture.thumbnail((TILE, TILE))
    return picture


def _spread(source: Source, samples: int) -> Iterator[int]:
    """Yields sample numbers that are spread evenly over the source."""
    yield from np.linspace(0, len(source) - 1, min(samples, len(source))).astype(int).tolist()


def _range(values: Sequence[int]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"least": int(min(values)), "median": float(np.median(values)), "most": int(max(values))}
