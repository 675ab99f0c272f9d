"""Checks Parquet and Arrow tables, and opens them for evaluation: one of READERS. No torch."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from typing import Any

from trainer.config import Data, is_remote
from trainer.data.bad_samples import Allowed
from trainer.data.columnar import (
    Columns,
    RowSelection,
    captions_at,
    check_columns,
    open_columnar,
    row_key,
    row_selection,
)
from trainer.data.files import persistent_each
from trainer.data.groups import number_at
from trainer.data.image_cells import drive_advice, image_cell, named_image
from trainer.data.index import THREADS, raise_all
from trainer.data.indexed import NAMED_IN_ALL, index_in_memory
from trainer.data.order import epoch_samples
from trainer.data.row_groups import Groups, cells_of, open_groups, too_large
from trainer.data.sample import BadSample, ByImage, LeftOut, Source
from trainer.data.sample_counts import shard_weights
from trainer.data.shard_names import expand_shards
from trainer.errors import InputError
from trainer.text.wording import many

Progress = Callable[[int, int], None]


def row_groups_by_image(data: Data, progress: Progress | None = None) -> Source:
    """Returns the images of tables, each once, with the captions of all rows that name it by path or URL."""
    index = index_in_memory(expand_shards(data.train), row_selection(data), progress)
    allowed = Allowed.by(data)
    source = open_columnar(index, data, allowed)
    rows: dict[object, list[int]] = {}
    bad: list[BadSample] = []
    for number, (name, flaw) in enumerate(zip(_image_names(data), _flaws_of_captions(data), strict=True)):
        if name is not None and flaw is not None:  # the image may have captions in other rows
            bad.append(flaw)
        else:
            rows.setdefault(number if name is None else name, []).append(number)
    if len(rows) == len(source):
        return source
    of_index = source.left_out
    counts = Counter(of_index.by_cause) + Counter(sample.cause for sample in bad)
    left_out = LeftOut(counts, [*of_index.named, *bad][:NAMED_IN_ALL], of_index.filtered)
    by_image = ByImage(source, list(rows.values()), left_out)
    allowed.check(by_image.left_out, len(by_image))
    if not len(by_image):
        raise InputError(f"{bad[0]}: no row can be used")
    return by_image


def check_row_groups(files: Sequence[str], data: Data) -> int | None:
    """Returns the number of samples of an epoch; None with filters, which are decided at the start.

    Raises InputError, which lists what is malformed or missing, and row groups that memory does not hold.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        found = persistent_each(files, lambda file: _checked(file, data), pool)
    raise_all([result for result in found if isinstance(result, InputError)])
    tables = [result for result in found if not isinstance(result, InputError)]
    if problems := [problem for _, of_table in tables for problem in of_table]:
        raise InputError("\n".join(problems))
    if data.filters:
        return None
    sizes = [rows for of_table, _ in tables for rows in of_table]
    return epoch_samples(sizes, shard_weights(data, [len(of_table) for of_table, _ in tables]))


def _checked(file: str, data: Data) -> tuple[Sequence[int], list[str]]:
    """Returns the rows of each row group of a table, and what is wrong with it.

    Raises InputError if it is malformed or lacks a column.
    """
    selection, most = row_selection(data), data.row_group_cache_mb * 2**20
    with open_groups(file, data.kind) as groups:
        check_columns(file, groups, [*selection.columns, *selection.filter_columns])
        unpacked = (groups.unpacked_bytes(group, selection.columns) for group in range(len(groups.sizes)))
        problems = [too_large(file, group, most) for group, size in enumerate(unpacked) if size > most]
        problems += _missing_images(file, groups, selection)
    return groups.sizes, problems


def captions_of_groups(file: str, data: Data) -> Iterator[str]:
    """Yields the captions of a table's rows, of which it reads no image: `captions` of READERS."""
    columns = Columns.by(data)
    for _, cells in _rows_of(file, data, columns.of_captions):
        with suppress(BadSample):
            yield from captions_at(cells, columns, file, "").texts


def _flaws_of_captions(data: Data) -> Iterator[BadSample | None]:
    """Yields for each row what is wrong with its captions; None if nothing is."""
    columns = Columns.by(data)
    for file in expand_shards(data.train):
        for key, cells in _rows_of(file, data, columns.of_captions):
            try:
                captions_at(cells, columns, file, key)
            except BadSample as flaw:
                yield flaw
            else:
                yield None


def numbers_of_groups(file: str, data: Data) -> Iterator[int]:
    """Yields the number of the group that data.group_by puts each row in: `groups` of READERS."""
    place = Columns.by(data).group
    for _, cells in _rows_of(file, data, list(map(str, place[:1]))):
        with suppress(ValueError):
            yield number_at(cells, place)


def _rows_of(file: str, data: Data, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_groups(file, data.kind) as groups:
        for group in range(len(groups.sizes)):
            for row, cells in enumerate(cells_of(groups, group, names)):
                yield row_key(group, row), cells


def _missing_images(file: str, groups: Groups, selection: RowSelection) -> Iterator[str]:
    """Yields what is wrong if image files that a table names do not exist."""
    rows = [
        (number, name)
        for number, name in enumerate(_names_in(groups, file, selection))
        if name is not None and not is_remote(name) and not os.path.isfile(name)
    ]
    if rows:
        yield (
            f"{file}: {len(rows):,} of {many(sum(groups.sizes), 'image file')} are missing; the first is "
            f"{rows[0][1]} in row {rows[0][0] + 1} (relative paths start at the table's folder)"
            f"{drive_advice(os.path.relpath(name, os.path.dirname(file)) for _, name in rows)}"
        )


def _image_names(data: Data) -> Iterator[str | None]:
    """Yields for each row the path or the URL of its image; None for an image that the table holds."""
    selection = row_selection(data)
    for file in expand_shards(data.train):
        with open_groups(file, data.kind) as groups:
            yield from _names_in(groups, file, selection)


def _names_in(groups: Groups, file: str, selection: RowSelection) -> Iterator[str | None]:
    for group, size in enumerate(groups.sizes):
        if not (columns := groups.naming(group, selection.image)):
            yield from repeat(None, size)
            continue
        for row, cells in enumerate(cells_of(groups, group, columns)):
            image = image_cell(cells, selection.image)
            if isinstance(image, bytes):  # a group holds images or names them, but for rows without any
                yield from repeat(None, size - row)
                break
            yield named_image(image, file)
