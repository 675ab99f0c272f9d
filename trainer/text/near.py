"""Names that are nearest to a mistyped one, for messages. Imports nothing of this package."""

import difflib
from collections.abc import Iterable, Sequence

_SHOWN = 3


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Returns `; did you mean ...?` with the known names that are near, the nearest first; "" for none."""
    return meant(near(given, known))


def near(given: str, known: Iterable[str]) -> list[str]:
    """Returns up to three of the known names that are near, the nearest first."""
    return difflib.get_close_matches(given, dict.fromkeys(known), n=_SHOWN)


def meant(names: Sequence[str]) -> str:
    """Returns `; did you mean ...?` with the first of the names; "" for none."""
    return f"; did you mean {', '.join(names[:_SHOWN])}?" if names else ""
