"""Shows a log line that several ranks wrote at about the same time once. Imports nothing of this project."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from trainer.text.wording import runs_text

TOGETHER_S = 5.0
"""Longest time between the same line of two ranks."""
_MOST = 10_000
"""Lines that are held back at most, while those of other ranks may come."""


@dataclass
class _Line:
    at: float
    """Seconds since the epoch; 0 for a line without a time."""
    text: str
    message: str
    """The text without its time."""
    ranks: list[int]


def each_once(lines: Iterable[tuple[str, int, str]]) -> Iterator[str]:
    """Yields `[ranks] line` for lines of ranks, in the order of their first times.

    A line is its time ("" without one), its rank and its text, which begins with that time. A line that a
    rank repeats is shown again.
    """
    held: list[_Line] = []
    by_message: dict[str, list[_Line]] = defaultdict(list)
    for stamp, rank, text in lines:
        at, message = _seconds(stamp), text.removeprefix(stamp)
        same = next((one for one in by_message[message] if rank not in one.ranks), None)
        if same is not None and at - same.at <= TOGETHER_S:
            same.ranks.append(rank)
            continue
        late = next((n for n, one in enumerate(held) if at - one.at <= TOGETHER_S), len(held))
        if late or len(held) >= _MOST:
            late = late or len(held)
            yield from map(_shown, held[:late])
            held = held[late:]
            by_message = _by_message(held)
        held.append(_Line(at, text, message, [rank]))
        by_message[message].append(held[-1])
    yield from map(_shown, held)


def _by_message(lines: Sequence[_Line]) -> dict[str, list[_Line]]:
    found: dict[str, list[_Line]] = defaultdict(list)
    for line in lines:
        found[line.message].append(line)
    return found


def _shown(line: _Line) -> str:
    return f"[{runs_text(line.ranks)}] {line.text}"


def _seconds(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp.strip().replace(",", ".")).timestamp()
    except ValueError:
        return 0.0
