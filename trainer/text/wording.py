"""Numbers in sentences. Imports nothing of ours."""

from collections.abc import Iterable


def many(count: int, one: str, several: str | None = None) -> str:
    """Returns a count with its noun, such as `1 rank` or `2,048 ranks`.

    `several` is the plural, if it is not formed by adding an s.
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def shortened(text: str, most: int) -> str:
    """Returns a text with about `most` characters at most: of a longer one its begin and its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {many(len(text) - 2 * half, 'character')} left out ...] {text[-half:]}"


def duration(seconds: float) -> str:
    """Returns a duration given in seconds as `1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def runs_text(numbers: Iterable[int], between: str = ",") -> str:
    """Returns numbers as runs of those that follow each other, in order: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return between.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def in_gb(size: int) -> str:
    """Returns a number of bytes with three digits, such as `1.82 GB` or `84.3 MB`."""
    if size >= 100e9:
        return f"{size / 1e9:,.0f} GB"
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
