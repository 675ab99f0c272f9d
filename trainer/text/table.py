"""Lays out tables for the terminal. Imports nothing of this project."""

from collections.abc import Iterator, Sequence

_GAP = "  "
_LEAST_LAST = 20
"""Columns of the terminal for the last field of a row, however wide the others are."""


def aligned(rows: Sequence[Sequence[str]], width: int = 0) -> Iterator[str]:
    """Yields a line for each row, with its fields below those of the rows above.

    No line is wider than `width`, if that is not 0: the last field is cut.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        *first, last = (f"{field:<{size}}" for field, size in zip(row, widths, strict=True))
        before = "".join(field + _GAP for field in first)
        if width:
            last = last[: max(_LEAST_LAST, width - len(before))]
        yield (before + last).rstrip()
