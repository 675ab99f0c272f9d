"""Numbers in sentences. Imports nothing."""


def many(count: int, one: str, several: str | None = None) -> str:
    """`1 rank`, `2,048 ranks`; `several` where the plural does not end in s alone."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"
