"""Names that are nearest to a mistyped one, for messages. Imports nothing of this package."""

import difflib
from collections.abc import Iterable, Sequence

_SHOWN = 3


def did_you_mean(given: str, known: Iterable[str], most: int = _SHOWN, least: float = 0.6) -> str:
    """Returns `; did you mean ...?` with the names that `near` finds; "" for none."""
    return meant(near(given, known, most, least))


def near(given: str, known: Iterable[str], most: int = _SHOWN, least: float = 0.6) -> list[str]:
    """Returns the known names that are near, the nearest first: up to `most`, at least so similar."""
    return difflib.get_close_matches(given, dict.fromkeys(known), most, least)


def meant(names: Sequence[str]) -> str:
    """Returns `; did you mean ...?` with the first of the names; "" for none."""
    return f"; did you mean {', '.join(names[:_SHOWN])}?" if names else ""
