"""Tables in row groups, written in each format, and damage to them."""

from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc, parquet


def write_parquet(path: Path, columns: dict[str, Any], per_group: int = 4) -> str:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=per_group)
    return str(path)


def write_arrow(path: Path, columns: dict[str, Any], per_group: int = 4, new: Any = ipc.new_file) -> str:
    table = pyarrow.table(columns)
    with new(path, table.schema) as file:
        file.write_table(table, max_chunksize=per_group)
    return str(path)


def write_stream(path: Path, columns: dict[str, Any], per_group: int = 4) -> str:
    return write_arrow(path, columns, per_group, ipc.new_stream)


def damage(path: Path, group: int, column: int, noise: bytes) -> None:
    """Writes noise over the begin of a column of a row group of a Parquet file."""
    of = parquet.ParquetFile(path).metadata.row_group(group).column(column)
    at, content = of.dictionary_page_offset or of.data_page_offset, bytearray(path.read_bytes())
    content[at : at + len(noise)] = noise
    path.write_bytes(content)
