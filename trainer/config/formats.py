"""Table of the formats of training data: what keys and messages need to know of one.

How a format is read is a class, in the table of `trainer.data.formats`. Pure; opens no file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from trainer.text.near import near


@dataclass(frozen=True)
class FormatRow:
    """Facts about one format."""

    name: str
    """Value of data.format."""
    unit: str
    """Word for one of its files in messages, such as "shard"; empty if it has no files."""
    endings: tuple[str, ...]
    """Endings of names by which data.format = "auto" knows it, with a dot; none for the format that takes
    all other names."""
    reads: tuple[str, ...]
    """Keys of `[data]` that only some formats read, those that this one reads; without their section."""
    fields: Literal["json", "columns", "nested columns"] = "columns"
    """Meaning of the names of fields: paths into a sample's JSON, columns, or paths that begin with one."""
    measures_images: bool = False
    """True if its index can tell the size of images, which some of data.filters need."""


_IN_FILES = (
    "max_image_pixels",
    "transparency",
    "max_member_bytes",
    "max_bad_share",
    "on_bad_sample",
    "caption_weights",
    "caption_template",
    "empty_captions",
    "filters",
    "group_by",
)
_WITH_SCORES = ("scores", "scores_by")
_IN_TABLES = ("image_column", "caption_column")
_IN_BLOCKS = ("read_ahead_mb", "cache", "cache_gb")

SHARDS = FormatRow(
    name="webdataset",
    unit="shard",
    endings=(),
    reads=(
        *_IN_FILES,
        "image_key",
        "caption_key",
        "caption_lines",
        "index",
        "encoding",
        "block_samples",
        *_IN_BLOCKS,
        *_WITH_SCORES,
    ),
    fields="json",
    measures_images=True,
)
_TABLE = FormatRow(
    name="table",
    unit="table",
    endings=(".csv", ".tsv"),
    reads=(*_IN_FILES, *_IN_TABLES, "separator", "quotes", "encoding"),
)


def _columnar(name: str, *endings: str, reads: Sequence[str] = ()) -> FormatRow:
    """Returns the row of a format of tables in row groups, with keys that it alone of them reads."""
    return FormatRow(
        name=name,
        unit=f"{name.title()} file",
        endings=endings,
        reads=(*_IN_FILES, *_IN_TABLES, "index", "row_group_cache_mb", *_WITH_SCORES, *reads),
        fields="nested columns",
        measures_images=True,
    )


_IN_ROW_GROUPS = (
    _columnar("parquet", ".parquet", reads=_IN_BLOCKS),
    _columnar("arrow", ".arrow", ".feather"),  # mapped into memory
)
_SYNTHETIC = FormatRow(
    name="synthetic",
    unit="",
    endings=(),
    reads=("synthetic_samples",),
)

FORMATS: dict[str, FormatRow] = {row.name: row for row in (SHARDS, _TABLE, *_IN_ROW_GROUPS, _SYNTHETIC)}
"""Rows by name."""


OTHER_COLUMNS = {
    "image": ("jpg", "filepath", "png", "webp", "image_path", "file_name"),
    "caption": ("title", "text", "txt"),
}
"""Columns that tables of img2dataset, open_clip and others have for the usual ones."""


def column_meant(name: str, columns: Sequence[str]) -> str:
    """Returns the column of a table that one which it lacks may stand for; empty if there is none."""
    others = [other for other in OTHER_COLUMNS.get(name, ()) if other in columns]
    return next(iter(others or near(name, columns)), "")


def format_of(names: Sequence[str]) -> FormatRow:
    """Returns the format whose endings all names have; shards if there is none."""
    rows = {row_of(name) for name in names}
    return rows.pop() if len(rows) == 1 else SHARDS


def row_of(name: str) -> FormatRow:
    """Returns the format of one file by its ending."""
    ending = PurePosixPath(name).suffix.lower()
    return next((row for row in FORMATS.values() if ending in row.endings), SHARDS)
