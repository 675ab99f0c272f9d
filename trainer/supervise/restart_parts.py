"""Splits the seconds of one restart by what they were spent on. Pure: the caller says what time it is.

No torch.
"""

from collections.abc import Mapping
from typing import Any

PARTS: dict[str, str] = {
    "detect": "deciding",
    "end": "ending the ranks",
    "agree": "recording the restart",
    "wait": "waiting",
    "start": "starting processes",
    "connect": "connecting",
    "prepare": "preparing",
    "restore": "restoring",
    "first_step": "the first step",
    "redone": "steps done again",
}
"""Parts of a restart in their order, with the words for people."""
_OF_MOMENTS = {
    "running": "start",
    "connected": "connect",
    "prepared": "prepare",
    "restored": "restore",
    "stepped": "first_step",
}
"""Part that ends at a moment of rank 0's heartbeat."""
_SHOWN_S = 0.05


class RestartClock:
    """Collects the times at which the parts of one restart ended; all times are of one clock, in seconds."""

    def __init__(self, began: float) -> None:
        """`began` is the time at which the fault was reported."""
        self._at = began
        self._parts: dict[str, float] = {}

    def end_part(self, part: str, at: float) -> None:
        """Records that a part of `PARTS` ended at this time, and with it every part before it."""
        self._parts[part] = round(max(0.0, at - self._at), 2)
        self._at = max(self._at, at)

    def end_ranks_parts(self, moments: Mapping[str, float]) -> None:
        """Records the parts that end at moments of rank 0's heartbeat; a missing moment is left out."""
        for moment, part in _OF_MOMENTS.items():
            if moment in moments:
                self.end_part(part, moments[moment])

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part; a part that did not occur is missing."""
        return dict(self._parts)


def parts_text(parts: Any) -> str:
    """Returns the parts in words, such as `starting processes 2.1 s, restoring 0.3 s`, without tiny ones.

    `parts` comes from a file: "" if it is no table of parts.
    """
    if not isinstance(parts, dict):
        return ""
    shown = ((words, parts.get(part)) for part, words in PARTS.items())
    return ", ".join(
        f"{words} {seconds:.1f} s"
        for words, seconds in shown
        if isinstance(seconds, int | float) and seconds >= _SHOWN_S
    )
