"""Finds captions in GBK whose bytes happen to be UTF-8, so that they are read without an error. No torch."""

import re
import unicodedata
from collections.abc import Iterable

from trainer.text.wording import many

_RUN = re.compile("[\u0080-\u07ff]{2,}")
"""Characters of two bytes in UTF-8, as two characters of GBK may look."""
_CONTROLS = re.compile("[\u0080-\u009f]")
"""Characters that no text has, but UTF-8 that was read as Latin-1 and written as UTF-8 again."""
_NONE = "UNASSIGNED"
"""Script of characters that do not exist."""
_LEAST, _LEAST_SHARE = 3, 0.01
"""Odd captions for a warning, at least, and their share of those that are not ASCII.

The advice changes how all captions are read, and some are odd in most data.
"""
_SCRIPTS = {
    "LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "HEBREW", "ARABIC", "SYRIAC", "THAANA", "NKO", _NONE
}  # fmt: skip


def _script(letter: str) -> str:
    return _NONE if unicodedata.category(letter) == "Cn" else unicodedata.name(letter, "").partition(" ")[0]


def as_gbk(text: str) -> str | None:
    """Returns the text as GBK has it if its words mix scripts, as nobody writes them; else None."""
    runs = [] if _CONTROLS.search(text) else _RUN.findall(text)
    if not any(len(set(map(_script, run)) & _SCRIPTS) > 1 for run in runs):
        return None
    try:
        other = text.encode().decode("gb18030")
    except UnicodeDecodeError:
        return None
    letters = [letter for letter in other if letter.isalpha() and not letter.isascii()]
    return other if all(_script(letter) == "CJK" for letter in letters) else None


def gbk_warning(captions: Iterable[str], encoding: str) -> str:
    """Returns a sentence if captions read as UTF-8 seem to be GBK; else an empty text."""
    if encoding != "utf-8":
        return ""
    foreign = [caption for caption in captions if not caption.isascii()]
    odd = [(caption, other) for caption in foreign if (other := as_gbk(caption)) is not None]
    if len(odd) < max(_LEAST, _LEAST_SHARE * len(foreign)):
        return ""
    caption, other = odd[0]
    return (
        f'{len(odd)} of {many(len(foreign), "caption")} that are not ASCII, such as "{caption}", seem to be '
        f'GBK, which is also valid UTF-8 ("{other}"): set data.encoding = "gb18030"'
    )
