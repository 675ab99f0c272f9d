"""Finds captions in GBK whose bytes happen to be UTF-8, so that they are read without an error. No torch."""

import re
import unicodedata
from collections.abc import Iterable

_RUN = re.compile("[\u0080-\u07ff]{2,}")
"""Characters of two bytes in UTF-8, as two characters of GBK may look."""
_NONE = "UNASSIGNED"
"""Script of characters that do not exist."""
_SCRIPTS = {
    "LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "HEBREW", "ARABIC", "SYRIAC", "THAANA", "NKO", _NONE
}  # fmt: skip


def as_gbk(text: str) -> str | None:
    """Returns the text as GBK has it if its words mix scripts, as nobody writes them; else None."""
    for run in _RUN.findall(text):
        scripts = {unicodedata.name(letter, _NONE).partition(" ")[0] for letter in run} & _SCRIPTS
        if len(scripts) > 1:
            try:
                return text.encode().decode("gbk")
            except UnicodeDecodeError:
                return None
    return None


def gbk_warning(captions: Iterable[str], encoding: str) -> str:
    """Returns a sentence if a caption read as UTF-8 seems to be GBK; else an empty text."""
    if encoding != "utf-8":
        return ""
    for caption in captions:
        if not caption.isascii() and (other := as_gbk(caption)) is not None:
            return (
                f'the caption "{caption}" seems to be "{other}" in GBK, which is also valid UTF-8: set '
                'data.encoding = "gb18030"'
            )
    return ""
