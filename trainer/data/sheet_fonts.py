"""Fonts for captions in any script: Pillow's own, else one of this machine that has their characters.

No torch.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from PIL import ImageFont

FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/System/Library/Fonts",
    "/Library/Fonts",
)
_ENDINGS = (".ttf", ".ttc", ".otf")
_MOST = 500
"""Fonts of a machine that are tried."""
_NOT_WANTED = ("bold", "italic", "oblique", "mono", "math", "serif", "light", "thin", "condensed")
_NO_CHARACTER = "\U0010fffe"
"""A code point that no font has: it is drawn as the font's box."""


class Fonts:
    """Chooses a font for each text, and knows the characters that none draws."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._opened = [_Font(ImageFont.load_default(size))]
        self._others = islice(_paths(), _MOST)
        self.lacking: set[str] = set()

    def of(self, text: str) -> "_Face":
        """Returns a font that draws all characters of the text, or as many as any font does."""
        wanted = {letter for letter in text if letter.isprintable() and not letter.isspace()} - self.lacking
        for font in self._all():
            if all(map(font.draws, wanted)):
                return font.face
        self.lacking |= {letter for letter in wanted if not any(font.draws(letter) for font in self._opened)}
        return max(self._opened, key=lambda font: sum(map(font.draws, wanted))).face

    def _all(self) -> Iterator["_Font"]:
        """Yields the fonts that are open, then those of the machine, which are kept open."""
        yield from list(self._opened)
        for path in self._others:
            try:
                font = _Font(ImageFont.truetype(path, self._size))
            except OSError:  # it is no font that Pillow can read
                continue
            self._opened.append(font)
            yield font


_Face = ImageFont.FreeTypeFont | ImageFont.ImageFont


class _Font:
    def __init__(self, face: _Face) -> None:
        self.face = face
        self._box = _drawn(face, _NO_CHARACTER)
        self._known: dict[str, bool] = {}

    def draws(self, letter: str) -> bool:
        """Returns whether the font has this character."""
        if letter not in self._known:
            self._known[letter] = _drawn(self.face, letter) not in (b"", self._box)
        return self._known[letter]


def _drawn(face: _Face, letter: str) -> bytes:
    """Returns the pixels of a character; nothing if the font cannot draw it."""
    try:
        return bytes(face.getmask(letter))
    except (UnicodeError, OSError):
        return b""


def _paths() -> Iterator[Path]:
    """Yields the font files of this machine, plain ones first."""
    folders = (Path(folder).expanduser() for folder in FOLDERS)
    files = (path for folder in folders for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
    yield from sorted(files, key=lambda path: (sum(each in path.name.lower() for each in _NOT_WANTED), path))
