"""Folders that are whole or not there: filled beside their place, then renamed. Imports no torch."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from trainer.errors import InputError


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to fill; it is renamed to `out` if the block succeeds and removed if it fails."""
    beside = out.parent / f".{out.name}.partial-{token_hex(4)}"
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"{out}: cannot be written: {error.strerror} ({error.filename}); choose another folder"
        ) from error
    try:
        yield beside
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
