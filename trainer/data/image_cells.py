"""Images in the cells of a table: bytes, the path of a file, or a URL. No torch."""

import base64
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.config import is_remote
from trainer.config.caption_key import Path
from trainer.config.stores import Address
from trainer.data.captions import field_value
from trainer.data.files import fetch, persistent, read_file
from trainer.data.sample import BadSample, check_bytes, check_file
from trainer.errors import InputError

INSIDE = "data://"
"""Beginning of what stands for a picture that a text cell holds in base64, in place of its name."""
_PICTURES = ("/9j/", "_9j_", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A")
"""Beginnings of JPEG, PNG, GIF, WebP, BMP and TIFF in base64."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_\s-]{48,}={0,2}\s*")
_URL_SAFE = str.maketrans("-_", "+/")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
WAITS_S = (0.5, 1.0)
"""Pauses in seconds before an address is asked again: among many, some are dead."""


def image_cell(cells: Mapping[str, Any], place: Path) -> object:
    """Returns the bytes, path or URL of a row's image; None if there is none.

    A cell of Hugging Face's datasets is a struct with `bytes`, `path` or both.
    """
    try:
        cell = field_value(cells, place)
    except ValueError:
        return None
    found = cell.get("bytes") or cell.get("path") if isinstance(cell, Mapping) else cell
    return named_or_inside(found) if isinstance(found, str) else found


def named_or_inside(text: str) -> str:
    """Returns the text of a cell, which names an image, or with INSIDE if it is a picture in base64."""
    return f"{INSIDE}{text}" if text.startswith(_PICTURES) and _BASE64.fullmatch(text) else text


def image_bytes(cell: object, table: str, key: str, most_bytes: int) -> bytes:
    """Returns the image file that a cell holds or names; relative paths start at the table's folder.

    Raises BadSample, and StorageError if a file stays unreadable.
    """
    if cell is None or cell in (b"", ""):
        raise BadSample(table, key, "no image", "its image is empty")
    if isinstance(cell, bytes):
        check_bytes(table, key, "image", len(cell), most_bytes)
        return cell
    name = named_image(cell, table)
    if name is None:
        kind = type(cell).__name__
        raise BadSample(table, key, "no image", f"its image is neither bytes nor a path but {kind}")
    if name.startswith(INSIDE):
        check_bytes(table, key, "image", len(name) * 3 // 4, most_bytes)
        try:
            return base64.b64decode(name.removeprefix(INSIDE).translate(_URL_SAFE) + "==")
        except ValueError as error:
            raise BadSample(table, key, "damaged image", f"its image is no base64: {error}") from error
    return (_fetched if is_remote(name) else _file)(name, table, key, most_bytes)


def named_image(cell: object, table: str) -> str | None:
    """Returns the URL or the path that a cell names, with the table's folder; None if it names nothing."""
    if not isinstance(cell, str) or not cell:
        return None
    return cell if is_url(cell) else os.path.normpath(local_path(os.path.dirname(table), cell))


def is_url(name: str) -> bool:
    """Returns whether a table names an address, and no path; a command of a stream is none of both."""
    return "://" in name


def local_path(folder: str, name: str) -> str:
    """Returns the path that a table names; backslashes separate as on Windows unless there is such a file."""
    path = os.path.join(folder, name)
    if "\\" in name and not os.path.exists(path):
        return os.path.join(folder, name.replace("\\", "/"))
    return path


def drive_advice(names: Iterable[str]) -> str:
    """Returns a clause for a message about missing files if a name begins with a drive of Windows."""
    found = next(filter(_DRIVE.match, names), None)
    return "" if found is None else f"; {found} is a path of Windows: name files relative to the table"


def _file(path: str, table: str, key: str, most_bytes: int) -> bytes:
    if not os.path.exists(path):
        raise BadSample(table, key, "no image", f"there is no image {path}")
    return read_file(
        path,
        f"{table}: sample {key}: image {path}",
        lambda status: check_file(table, key, status, most_bytes),
    )


def _fetched(url: str, table: str, key: str, most_bytes: int) -> bytes:
    try:
        address = Address.of_data(url)
    except InputError as problem:
        raise BadSample(table, key, "no image", f"its image cannot be fetched: {problem}") from None
    try:
        content = persistent(url, lambda: fetch(address, most_bytes), WAITS_S)
    except InputError as error:
        raise BadSample(table, key, "image not fetched", f"its image cannot be fetched: {error}") from error
    check_bytes(table, key, "image", len(content), most_bytes)
    return content
