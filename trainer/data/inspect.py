"""Shows people what a source of samples holds: numbers, and a page of pictures. No torch."""

import base64
import html
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from trainer.data.caption_lengths import CaptionLengths
from trainer.data.pictures import decode
from trainer.data.sample import BadSample, RawSample, Source
from trainer.text.terminal import shown

LengthsOf = Callable[[Sequence[str]], CaptionLengths | None]
"""Function from captions to their numbers of tokens; None if these are not known here."""
_TILE = 192
"""Pixels of a picture on the sheet: its width and its height are no larger."""
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
    lengths, times = lengths_of(texts), Counter(texts)
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
        "equal_captions": sum(count for count in times.values() if count > 1),
        "captions_per_image": _range(captions),
        "caption_characters": _range([len(text) for text in texts]),
        "caption_tokens": _range(lengths.tokens) if lengths else None,
        "context_length": lengths.most if lengths else None,
        "cut_captions": round(lengths.cut_share, 4) if lengths else None,
    }


def contact_page(source: Source, samples: int) -> str:
    """Returns an HTML page of pictures, each above its first caption.

    A sample that cannot be decoded shows the reason.
    """
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


def _thumbnail(raw: RawSample) -> Image.Image:
    picture = decode(raw)
    picture.thumbnail((_TILE, _TILE))
    return picture


def _spread(source: Source, samples: int) -> Iterator[int]:
    """Yields sample numbers that are spread evenly over the source."""
    yield from np.linspace(0, len(source) - 1, min(samples, len(source))).astype(int).tolist()


def _range(values: Sequence[int]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {"least": int(min(values)), "median": float(np.median(values)), "most": int(max(values))}
