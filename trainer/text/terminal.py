"""Makes text from others (files, samples, logs, job files) harmless before it reaches a terminal or a log.

Control characters are escaped and secrets are masked. Imports no torch.
"""

import json
import os
import re
import sys
from contextlib import suppress
from typing import TextIO

from trainer.errors import bounded
from trainer.text.masking import masked

ERASE = "\r\x1b[K"
"""Moves a terminal's cursor to the first column and erases the line."""
LIVE = "CLIPSHIP_LIVE_LINE"
"""Variable that says that another process rewrites a line in the terminal; see `trainer.text.live`."""

_ACTS = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, except line feed and tab
    # characters that reorder or break a line, or are invisible
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f"
    "\ud800-\udfff]"  # surrogates, which no stream can encode
)
_ACTING = re.compile(_ACTS)
_ACTING_ON_LINES = re.compile(rf"[\t\n]|{_ACTS}")


def printable(text: str) -> str:
    r"""Returns the text with control characters escaped (\u001b, \u202e), which a terminal would act on.

    Line feeds and tabs stay.
    """
    return _ACTING.sub(_escaped, text)


def one_line(text: str) -> str:
    """Returns the text as `printable` does, with line feeds and tabs escaped too, for names in messages."""
    return _ACTING_ON_LINES.sub(_escaped, text)


def shown(text: object) -> str:
    """Returns the text as people may see it: secrets masked, control characters escaped.

    Applying it twice changes nothing.
    """
    return printable(masked(str(text)))


def say(text: object) -> None:
    """Print one message of Clipship on stderr, as `shown` returns it."""
    tell(f"clipship: {text}")


def tell(text: object) -> None:
    """Print lines on stderr, as `shown` returns them.

    A console that is gone, or on a full disk, loses them: it must not change how a run goes on or ends.
    """
    lines = bounded(shown(text))
    with suppress(OSError, ValueError):  # ValueError: the stream was closed
        print(f"{erased(sys.stderr)}{lines}", file=sys.stderr, flush=True)


def can_move(stream: TextIO) -> bool:
    """Returns whether the stream ends in a terminal in which a line can be rewritten."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def erased(stream: TextIO) -> str:
    """Returns what erases the line that another process rewrites there; "" if none does."""
    return ERASE if LIVE in os.environ and can_move(stream) else ""


def _escaped(match: re.Match[str]) -> str:
    """Returns the character as JSON escapes it, so that JSON text stays JSON."""
    code = ord(match[0])
    return f"\\u{code:04x}" if code < 0x10000 and match[0] not in "\n\t" else json.dumps(match[0])[1:-1]
