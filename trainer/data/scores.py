"""`data.scores`: values of samples from tables beside the data, which filters compare. No torch.

A table is Parquet with a column "key" (or "uid"), and perhaps "shard"; or a list: keys in a .txt, a line
each, or DataComp's .npy of uids. A row belongs to the sample with that key, in the shard of that name if
there is one. Of several rows of a sample, such as one for each caption, the largest value counts. A folder
has a table for each shard, under the shard's name, as `clipship embed` writes them.
"""

import io
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config import Data
from trainer.config.filters import BY_KEY, CLIP_SCORE, LISTED, Filter, parse_filter, score_column
from trainer.data.feature_files import COSINE, KEY, SHARD, files_in, folder_named, key_text, stem
from trainer.data.files import opened, persistent
from trainer.data.groups import id_text
from trainer.data.index import THREADS
from trainer.data.row_groups import readable
from trainer.data.shard_names import expand_key, expand_shards
from trainer.data.store import read
from trainer.errors import InputError
from trainer.sysinfo.extras import require
from trainer.text.wording import many

log = logging.getLogger("clipship")

_KEYS = (KEY, "uid")
"""Columns that hold keys; the first that a table has is taken."""
_LISTS = (".txt", ".npy")
_TABLES = (".parquet", *_LISTS)
_lock = threading.Lock()
_hash = partial(blake2b, digest_size=16)


class Scores(NamedTuple):
    """The tables that a job's filters read: part of what an index has of a file."""

    files: tuple[str, ...]
    folder: str
    """Folder of the files, if each is that of one shard; else empty."""
    columns: tuple[str, ...]
    """Columns that filters compare."""
    by: str
    """Value of data.scores_by."""
    depth: int
    """Last parts of a shard's path that tell it from the others."""
    identity: str
    """Digest of the lists, and of the columns of tables that are read."""

    def of_shard(self, path: str) -> "KeyTable":
        """Returns the rows for the samples of a shard. Raises InputError and StorageError."""
        if self.folder:
            table = _read([f"{self.folder}/{stem(path)}.parquet"], self)
        else:
            with _lock:  # threads scan shards at the same time
                table = _whole(self)
        begin = _begin(path, self.depth) if table.of_shards else ""
        return replace(table, begin=begin, by=self.by)


@dataclass(frozen=True)
class KeyTable:
    """Rows by the keys of their samples."""

    digests: NDArray[np.uint64]
    """Digests of the keys, [rows, 2], sorted."""
    values: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Values of the rows by column; NaN for null."""
    truths: frozenset[str] = frozenset()
    """Columns of true and false."""
    of_shards: bool = False
    """True if keys are those of shards: their digests are with the shard's name."""
    begin: str = ""
    """Name of the shard that is looked into."""
    by: str = BY_KEY
    """Value of data.scores_by."""

    def value(self, key: object, column: str) -> float | bool | None:
        """Returns a sample's value, None for null, by its key or the field in its place.

        Raises ValueError, the same for many samples, without a row and for a field that is no id.
        """
        text = id_text(key, "data.scores_by")
        if not text:
            raise ValueError("no id in data.scores_by, which data.filters need")
        rows = self._rows(digest(f"{self.begin}{key_text(text)}"))
        if column == LISTED:
            return bool(rows)
        if not rows:
            raise ValueError("no row in data.scores, which data.filters need")
        found = self.values[column][rows[0] : rows[-1] + 1]
        return self._as_read(column, float(np.fmax.reduce(found)))

    def every(self, column: str) -> Iterator[float | bool | None]:
        """Yields the value of each sample that has a row."""
        others = np.any(self.digests[1:] != self.digests[:-1], axis=1)
        firsts = np.flatnonzero(np.r_[True, others][: len(self.digests)])
        if column == LISTED:
            yield from [True] * len(firsts)
        else:
            largest = np.fmax.reduceat(self.values[column], firsts)
            yield from (self._as_read(column, value) for value in largest.tolist())

    def _rows(self, wanted: bytes) -> range:
        high, low = np.frombuffer(wanted, dtype=">u8").astype(np.uint64)
        column = self.digests[:, 0]
        first, last = np.searchsorted(column, high, "left"), np.searchsorted(column, high, "right")
        places = int(first) + np.flatnonzero(self.digests[first:last, 1] == low)
        return range(int(places[0]), int(places[-1]) + 1) if len(places) else range(0)

    def _as_read(self, column: str, value: float) -> float | bool | None:
        if np.isnan(value):
            return None
        return bool(value) if column in self.truths else value


def digest(key: str) -> bytes:
    """Returns 16 bytes that stand for a key: DataComp's uids, 32 hexadecimal digits, stand for themselves."""
    if len(key) == 32:
        try:
            return int(key, 16).to_bytes(16)
        except (ValueError, OverflowError):
            pass
    return _hash(key.encode()).digest()


def scored(filters: Sequence[str]) -> list[tuple[str, Filter]]:
    """Returns the filters that compare a column of data.scores, each behind that."""
    parsed = ((score_column(each.name), each) for each in map(parse_filter, filters))
    return [(column, each) for column, each in parsed if column is not None]


def scores_of(data: Data, identity: str = "") -> Scores | None:
    """Returns the tables that the job's filters read; None if they read none.

    `identity` is that which another rank has found; without it, the columns that are read tell it, once in a
    process. Raises InputError for tables that are missing, and for columns that they lack.
    """
    columns = tuple(dict.fromkeys(column for column, _ in scored(data.filters))) if data.scores else ()
    if not columns:
        return None
    require("pyarrow")
    shards = expand_shards(data.train)
    files, folder = _files(data.scores, shards)
    if (files, columns) not in _identities:
        _identities[files, columns] = identity or _identity(files, columns)
    return Scores(files, folder, columns, data.scores_by, _depth(shards), _identities[files, columns])


_identities: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
"""Identities of scores by their files and columns, as this process knows them."""


def kept_of_all(scores: Scores, filters: Sequence[str]) -> tuple[int, int]:
    """Returns how many samples have rows that fulfil the filters on scores, and how many have rows."""
    table = _read(scores.files, scores)
    conditions = scored(filters)
    found = zip(*(table.every(column) for column, _ in conditions), strict=True)
    try:
        passed = [
            all(each.holds(value) for (_, each), value in zip(conditions, values, strict=True))
            for values in found
        ]
    except ValueError as problem:
        raise InputError(f"data.filters: {problem}") from None
    return sum(passed), len(passed)


def forget_tables() -> None:
    """Frees the memory of the tables, once the data are indexed."""
    _whole.cache_clear()


def _files(patterns: Sequence[str], shards: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Returns the tables, and the folder if a folder with one for each shard is named."""
    if folder := folder_named(patterns[0]) if len(patterns) == 1 else "":
        return files_in(folder, shards, "data.scores"), folder
    files = tuple(expand_key("data.scores", patterns))
    if others := [file for file in files if not file.endswith(_TABLES)]:
        raise InputError(
            f"data.scores: {others[0]}: scores are {', '.join(_TABLES)}, or one folder of .parquet"
        )
    return files, ""


def _identity(files: Sequence[str], columns: Sequence[str]) -> str:
    """Returns a digest of the lists, and of the columns of tables that are read, as they are stored."""
    with ThreadPoolExecutor(THREADS) as pool:
        seals = list(pool.map(lambda file: persistent(file, partial(_seal, file, columns)), files))
    return _hash("".join(seals).encode()).hexdigest()


def _seal(file: str, columns: Sequence[str]) -> str:
    if file.endswith(_LISTS):
        return _hash(read(file, most=None) or b"").hexdigest()
    from pyarrow import parquet

    seal = _hash(stem(file).encode())
    with opened(file) as content, readable(file):
        held = parquet.read_metadata(content)
        wanted = {SHARD, *_columns_in(file, held.schema.to_arrow_schema(), columns).values()}
        for group, place in product(range(held.num_row_groups), range(held.num_columns)):
            part = held.row_group(group).column(place)
            if part.path_in_schema in wanted:
                begins = (part.dictionary_page_offset, part.data_page_offset)
                content.seek(min(begin for begin in begins if begin))
                seal.update(content.read(part.total_compressed_size))
    return seal.hexdigest()


def _columns_in(file: str, held: Any, columns: Sequence[str]) -> dict[str, str]:
    """Returns the columns that are read of a table, by the names that filters have for them.

    The column of keys has the name "". Raises InputError for one that is not there or holds no numbers.
    """
    from pyarrow import types

    by = next((name for name in _KEYS if name in held.names), " or ".join(_KEYS))
    found = {name: _source(name, held.names) for name in columns if name != LISTED}
    for name in (by, *found.values()):
        if name not in held.names:
            raise InputError(
                f"data.scores: {file} has no column {name}; its columns are {', '.join(held.names)}"
            )
    for name in found.values():
        kind = held.field(name).type
        if not (types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)):
            raise InputError(f"data.scores: {file}: column {name} is {kind}, and filters compare numbers")
    return {**found, "": by}


def _depth(shards: Sequence[str]) -> int:
    """Returns how many of the last parts of the paths tell the shards apart."""
    most = max(shard.count("/") for shard in shards) + 1
    return next((n for n in range(1, most) if len({_tail(each, n) for each in shards}) == len(shards)), most)


def _tail(path: str, depth: int) -> str:
    return "/".join(path.partition("?")[0].split("/")[-depth:])


def _begin(shard: str, depth: int) -> str:
    """Returns what the keys of a shard begin with."""
    return f"{_tail(shard or '', depth)}\0"


@lru_cache(maxsize=1)
def _whole(scores: Scores) -> KeyTable:
    return _read(scores.files, scores)


def _read(files: Sequence[str], scores: Scores) -> KeyTable:
    """Returns the rows of the tables together."""
    parts = [(_list if file.endswith(_LISTS) else _table)(file, scores) for file in files]
    if len({part.of_shards for part in parts}) > 1:
        raise InputError(
            f'data.scores: some tables have a column "{SHARD}" and others have none: give all one'
        )
    digests = np.concatenate([part.digests for part in parts])
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    values = {
        column: np.concatenate([part.values[column] for part in parts])[order] for column in parts[0].values
    }
    return replace(parts[0], digests=digests[order], values=values)


def _list(file: str, scores: Scores) -> KeyTable:
    """Returns the rows of a list of keys."""
    if lacking := [column for column in scores.columns if column != LISTED]:
        raise InputError(
            f"data.scores: {file} is a list of keys and has no column {lacking[0]}: "
            f'"scores:{LISTED} == true" keeps the samples in it'
        )
    content = read(file, most=None) or b""
    try:
        if file.endswith(".txt"):
            return KeyTable(_digests(filter(None, map(str.strip, content.decode("utf-8-sig").splitlines()))))
        found = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        if found.dtype.kind in "US" and found.ndim == 1:
            return KeyTable(_digests(found.astype(str).tolist()))
        if found.dtype.names and len(found.dtype.names) == 2:  # DataComp's two halves of a uid
            found = np.stack([found[name] for name in found.dtype.names], axis=1)
    except Exception as problem:  # damaged bytes can make numpy raise anything
        why = "it holds objects of Python" if "allow_pickle" in str(problem) else problem
        raise InputError(f"data.scores: {file} cannot be read as a list of keys: {why}") from None
    if found.dtype != np.uint64 or found.ndim != 2 or found.shape[1] != 2:
        raise InputError(
            f"data.scores: {file} holds {found.dtype} of shape {found.shape}: a list holds texts, or uids as "
            "two numbers of 64 bits each"
        )
    return KeyTable(found)


def _digests(keys: Iterable[str]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(map(digest, keys)), dtype=">u8").reshape(-1, 2).astype(np.uint64)


def _table(file: str, scores: Scores) -> KeyTable:
    """Returns the rows of a Parquet file."""
    from pyarrow import parquet, types

    with opened(file) as content, readable(file):
        held = parquet.read_schema(content)
        columns = _columns_in(file, held, scores.columns)
        of_shards = scores.by == BY_KEY and SHARD in held.names
        content.seek(0)
        table = parquet.read_table(content, columns=[*set(columns.values()), *([SHARD] * of_shards)])
        by = columns.pop("")
        keys = [key_text(id_text(key, f"column {by}")) for key in table[by].to_pylist()]
    if lacking := keys.count(""):
        log.warning(
            "data.scores  %s without a key in column %s of %s: no sample has it",
            many(lacking, "row"),
            by,
            file,
        )
        table = table.filter([key != "" for key in keys])
        keys = [key for key in keys if key]
    if of_shards:
        begins = {shard: _begin(shard, scores.depth) for shard in table[SHARD].unique().to_pylist()}
        keys = [begins[shard] + key for shard, key in zip(table[SHARD].to_pylist(), keys, strict=True)]
    values = {name: _numbers(table[column], file, column) for name, column in columns.items()}
    truths = frozenset(name for name, column in columns.items() if types.is_boolean(held.field(column).type))
    return KeyTable(_digests(keys), values, truths, of_shards)


def _numbers(column: Any, file: str, name: str) -> NDArray[np.float64]:
    """Returns the values of a column, NaN for null. Raises InputError for numbers that are no float64."""
    import pyarrow

    try:
        numbers: NDArray[np.float64] = column.cast("float64").to_numpy()
    except pyarrow.ArrowInvalid:
        raise InputError(
            f"data.scores: {file}: column {name} has whole numbers beyond 2^53, which would be compared with "
            "their neighbours: if they are ids, put them into the samples' JSON (in Parquet and Arrow a "
            "column) and filter by that"
        ) from None
    return numbers


def _source(name: str, held: Sequence[str]) -> str:
    """Returns the column that a name of filters means: the score of CLIP is a cosine."""
    return COSINE if name == CLIP_SCORE and name not in held else name
