"""Lays out tables for the terminal. Imports nothing of this project."""

from collections.abc import Iterable, Iterator, Sequence

_GAP = "  "
_LEAST_LAST = 20
"""Columns of the terminal for the last field of a row, however wide the others are."""


def by_topic(rows: Iterable[tuple[str, str]], column: int = 12) -> Iterator[str]:
    """Yields a line for each row: what it is about, and the text, which begins in that column.

    A row without a topic goes on with the one above.
    """
    for topic, text in rows:
        yield f"{topic:<{column}}{text}"


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


def without(rows: Sequence[Sequence[str]], titles: Sequence[str], width: int) -> list[list[str]]:
    """Returns the rows without as many of the titled columns as it takes to fit into `width`, if not 0.

    The first row has the titles; those of `titles` go in their order. The last field of a row may be cut.
    """
    left = [list(row) for row in rows]
    for title in titles:
        *first, last = (max(map(len, column)) for column in zip(*left, strict=True))
        if not width or sum(size + len(_GAP) for size in first) + min(last, _LEAST_LAST) <= width:
            break
        left = without_column(left, title)
    return left


def without_column(rows: Sequence[Sequence[str]], title: str) -> list[list[str]]:
    """Returns the rows without the column that has the title in the first row."""
    place = rows[0].index(title)
    return [[*row[:place], *row[place + 1 :]] for row in rows]
