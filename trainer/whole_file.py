"""Files that are whole or not there: written beside their place, flushed to the disk, renamed. Imports nothing of ours; no torch."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Put the text there in UTF-8, also over an older file; a kill or a full disk leaves the older one. Raises OSError."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name on an empty file
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    """See `write_whole` and `json_text`."""
    write_whole(path, json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON, which has no NaN and no infinities: they become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
