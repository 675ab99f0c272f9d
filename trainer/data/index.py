"""Index of shards on disk: the place of each usable sample. No torch.

With it a run opens many shards without reading them. A folder holds one file of rows for each shard, which is
mapped when a sample of that shard is first read, and a catalogue of all shards. Both carry checksums and are
replaced whole; shards of unchanged size and time are not read again. A file of rows begins with its shard's
entry of the catalogue, so that what was read before a job was killed is not read again either.
"""

import fcntl
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tarfile import BLOCKSIZE, HeaderError, TarInfo
from typing import TypeVar, cast

from pydantic import BaseModel, TypeAdapter

from trainer.config import is_remote
from trainer.data.entry import Content, Entry, Selects
from trainer.data.files import Stamp, opened, persistent, persistent_each, stamp
from trainer.data.tar import Rows, Selection
from trainer.errors import InputError, StorageError
from trainer.safe_io.atomic import replacing
from trainer.safe_io.plain import MOST_BYTES, MOST_LINES_BYTES, open_plain, open_regular, read_plain
from trainer.text.masking import masked

log = logging.getLogger("clipship")

File = TypeVar("File")
Result = TypeVar("Result")
FOLDER = ".clipship-index"
MAGIC = b"clipship index 1\n"
"""Begin of a file of rows; its entry follows, sealed by a digest, and then the rows."""
DIGEST_BYTES = 16
_STEM_BYTES = 200
"""Bytes of a shard's name that are in the name of its rows, which has at most 255."""
_LOOKS = 32
"""Samples of a tar, about, whose headers tell whether it is as it was indexed."""
THREADS = 16
"""Number of threads that read headers; on a network file system each header is a round trip."""


@dataclass(frozen=True)
class Index:
    """Catalogue of some files in the order asked for, with their rows in memory or on disk."""

    paths: tuple[str, ...]
    entries: tuple[Entry, ...]
    stored: tuple[bytes, ...] = ()
    """Bytes that are stored of the samples of each file, if they are in memory."""
    on_disk: tuple[Path, Selects] | None = None
    """Folder and selection, by which the files of rows are found if they are on disk."""

    def rows(self, number: int) -> Rows:
        """Returns the rows of one shard. Raises as `payload` does."""
        try:
            return Rows.of(self.payload(number), self.entries[number].samples)
        except (ValueError, IndexError):
            raise InputError(
                f"the index of {self.paths[number]} is damaged: remove it and run `clipship index` again"
            ) from None

    def payload(self, number: int) -> memoryview:
        """Returns what is stored of one file, which is mapped into memory if it is on disk.

        Raises InputError if it is damaged or differs from the catalogue, and StorageError if the file stays
        unreadable.
        """
        path, entry = self.paths[number], self.entries[number]
        if self.on_disk is None:
            return memoryview(self.stored[number])
        folder, selection = self.on_disk
        file = rows_file(folder, path, selection)

        def mapped() -> mmap.mmap | None:
            with open(file, "rb", opener=open_regular) as rows:
                if not os.fstat(rows.fileno()).st_size:
                    return None
                # Some file systems in user space map nothing that is shared.
                return mmap.mmap(rows.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)

        content = persistent(str(file), mapped, was_there=True)
        payload = memoryview(content or b"")[_begin_of_rows(content or b"") :]
        if content and _digest(payload) == entry.digest:
            return payload
        raise InputError(
            f"{file}: the index of {path} is damaged: remove the file and run `clipship index` again"
        )

    def is_as_indexed(self, number: int) -> bool:
        """Returns whether a file holds what was indexed, as far as its headers say; no if that is not known.

        Raises InputError, which names the file, if it cannot be read.
        """
        if self.on_disk is None:
            return False
        found, entry = scan(self.paths[number], self.on_disk[1]), self.entries[number]
        same_groups = list(found.entry.groups) == list(entry.groups)
        return same_groups and _digest(b"".join(found.payload)) == entry.digest

    def seems_as_indexed(self, number: int) -> bool:
        """Returns whether the headers of some members all over a tar are those that were indexed.

        Reading all headers takes a second for 10,000 samples. Raises InputError as `is_as_indexed` does.
        """
        if self.on_disk is None or not isinstance(self.on_disk[1], Selection):
            return False
        rows, path = self.rows(number), self.paths[number]

        def same() -> bool:
            with opened(path) as file:
                for row in range(0, len(rows), max(1, len(rows) // _LOOKS)):
                    place, key = rows.places[row], rows.key(row)
                    for member in ("image", "text"):
                        file.seek(int(place[f"{member}_at"]) - BLOCKSIZE)
                        header = TarInfo.frombuf(file.read(BLOCKSIZE), "utf-8", "surrogateescape")
                        if header.size != place[f"{member}_size"] or key not in header.name:
                            return False
            return True

        with suppress(HeaderError):
            return persistent(path, same)
        return False


def index_folder(paths: Sequence[str]) -> Path | None:
    """Returns the folder in which the index of these shards is or may be made, beside the first shard.

    Returns None if that folder cannot be written, and for URLs.
    """
    if is_remote(paths[0]):
        return None
    beside = Path(paths[0]).absolute().parent
    folder = beside / FOLDER
    return folder if os.access(folder if folder.exists() else beside, os.W_OK) or folder.exists() else None


def stale(paths: Sequence[str], selection: Selects, folder: Path, adopt: bool = True) -> dict[str, Stamp]:
    """Returns the shards that the index lacks or that have changed since, with their present versions.

    With `adopt` the catalogue gets what a killed job has read before. Raises as `versions_of` does.
    """
    return lacking(versions_of(paths), selection, folder, adopt)


def versions_of(paths: Sequence[str]) -> dict[str, Stamp]:
    """Returns the present versions of files. Raises InputError, which lists those without one."""
    with ThreadPoolExecutor(THREADS) as pool:
        stamps = persistent_each(paths, stamp, pool)
    raise_all([result for result in stamps if isinstance(result, InputError)])
    return dict(zip(paths, cast(Sequence[Stamp], stamps), strict=True))


def lacking(
    versions: Mapping[str, Stamp], selection: Selects, folder: Path, adopt: bool = True
) -> dict[str, Stamp]:
    """Returns those of the versions that the index lacks, as `stale` does."""
    known = read_catalogue(folder, selection)
    missing = {
        path: version
        for path, version in versions.items()
        if not _is_fresh(known.get(_name(folder, path)), version)
        or not rows_file(folder, path, selection).exists()
    }
    if adopt and (found := _left_behind(missing, selection, folder)):
        with suppress(InputError):  # then they are read again
            write_catalogue(folder, selection, {_name(folder, path): entry for path, entry in found.items()})
            missing = {path: version for path, version in missing.items() if path not in found}
    return missing


def _left_behind(versions: Mapping[str, Stamp], selection: Selects, folder: Path) -> dict[str, Entry]:
    """Returns the entries of shards that were read by a job which did not come to write the catalogue."""
    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(lambda path: read_entry(rows_file(folder, path, selection)), versions)
        return {
            path: entry
            for path, entry in zip(versions, entries, strict=True)
            if entry is not None and _is_fresh(entry, versions[path])
        }


def _is_fresh(entry: Entry | None, version: Stamp) -> bool:
    """Returns whether an entry is that of the shard as it is now."""
    # A damaged shard may have been mended while its time was kept.
    return entry is not None and not entry.damage and version == (entry.size, entry.changed)


def index_shards(
    versions: Mapping[str, Stamp],
    selection: Selects,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
) -> dict[str, Entry]:
    """Reads the headers of shards of these versions and writes their rows; returns the new catalogue entries.

    It works in the pool, or in threads. The entries are not in the catalogue yet, only beside their rows,
    where `stale` finds them. `progress` is called with (shards done, shards). Raises InputError, which names
    every shard that cannot be read; a damaged shard has an entry.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    entries = read_each(list(versions.items()), partial(_indexed, selection, folder), progress, pool)
    return {_name(folder, path): entry for path, entry in zip(versions, entries, strict=True)}


def read_each(
    files: Sequence[File],
    read: Callable[[File], Result],
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
) -> list[Result]:
    """Returns what `read` gives of each file, in the pool or in threads.

    `progress` is called with (files done, files). Raises InputError, which names every file that cannot be
    read. After another exception it waits only for the work that has begun.
    """
    results: list[Result] = []
    problems: list[InputError] = []
    with pool or ThreadPoolExecutor(THREADS) as workers:
        try:
            for done, result in enumerate(workers.map(partial(_or_problem, read), files), start=1):
                if isinstance(result, InputError):
                    problems.append(result)
                else:
                    results.append(result)
                if progress:
                    progress(done, len(files))
        except BaseException:
            workers.shutdown(cancel_futures=True)
            raise
    raise_all(problems)
    return results


def write_catalogue(folder: Path, selection: Selects, entries: Mapping[str, Entry]) -> None:
    """Adds the entries to the catalogue, all or none.

    Jobs that do so at the same time wait for each other.
    """
    file = catalogue_file(folder, selection)
    if not entries and file.exists():
        return
    with _locked(file):
        every = {**read_catalogue(folder, selection), **entries}
        text = json.dumps(
            {"selection": selection, "shards": {name: asdict(entry) for name, entry in every.items()}}
        ).encode()
        _write_whole(file, [_sealed(text)])


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Locks a file beside the catalogue, since the catalogue itself is replaced.

    Nothing is locked if the file system has no locks, or if that file is another user's.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            lock = open_plain(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, lock)  # which releases the lock
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def read_catalogue(folder: Path, selection: Selects) -> dict[str, Entry]:
    """Returns the catalogue; empty if there is none or it is damaged, so that all shards are read again."""
    try:
        text = _unsealed(
            read_plain(catalogue_file(folder, selection), most=MOST_LINES_BYTES, links=True).encode()
        )
    except (OSError, ValueError):
        return {}
    try:
        return _Catalogue.model_validate_json(text, strict=True).shards
    except ValueError as error:
        file = catalogue_file(folder, selection)
        log.warning(
            "%-12s malformed, so it is not used and is made again: %s (%s: %s)",
            "index",
            file,
            type(error).__name__,
            error,
        )
        return {}


class _Catalogue(BaseModel):
    shards: dict[str, Entry]


_ENTRY = TypeAdapter(Entry)


def open_index(
    paths: Sequence[str], selection: Selects, folder: Path, fresh: Mapping[str, Entry] | None = None
) -> Index:
    """Returns the index of shards that `index_shards` and `write_catalogue` have indexed.

    It reads nothing of the shards.

    `fresh` holds entries that were just made; without locks in the file system, another job may have removed
    them from the catalogue.
    """
    known = {**read_catalogue(folder, selection), **(fresh or {})}
    names = [_name(folder, path) for path in paths]
    missing = [path for path, name in zip(paths, names, strict=True) if name not in known]
    if missing:
        raise InputError(
            f"{folder}: the index lacks {len(missing)} of {len(paths)} shards, the first is {missing[0]}: "
            "run `clipship index`"
        )
    return Index(tuple(paths), tuple(known[name] for name in names), on_disk=(folder, selection))


def catalogue_file(folder: Path, selection: Selects) -> Path:
    """Returns the path of the catalogue for this selection of members."""
    return folder / f"catalogue-{_digest(repr(selection.identity).encode())[:8]}.json"


def rows_file(folder: Path, path: str, selection: Selects) -> Path:
    """Returns the path of the rows of one shard."""
    digest = _digest(repr((_name(folder, path), *selection.identity)).encode())[:12]
    stem = Path(masked(path)).stem.encode(errors="surrogateescape")[:_STEM_BYTES].decode(errors="ignore")
    return folder / f"{stem}-{digest}.rows"


def _name(folder: Path, path: str) -> str:
    """Returns a shard's name in the catalogue: relative, so that shards and index may move together.

    Secrets of an address are masked.
    """
    if not is_remote(path):
        return os.path.relpath(os.path.abspath(path), folder)
    kept = masked(path)
    return path if kept == path else f"{kept}#{_digest(path.encode())[:12]}"


def write_rows(file: Path, version: Stamp, content: Content) -> Entry:
    """Writes what is stored of a file; returns its entry, which the catalogue keeps."""
    digest = _digest(b"".join(content.payload))
    entry = replace(content.entry, size=version.size, changed=version.changed, digest=digest)
    _write_whole(file, [MAGIC, _sealed(json.dumps(asdict(entry)).encode()), b"\n", *content.payload])
    return entry


def read_entry(file: Path) -> Entry | None:
    """Returns the entry that a file of rows begins with; None if there is none that can be read."""
    try:
        with open(file, "rb", opener=open_regular) as rows:
            if rows.readline(len(MAGIC)) != MAGIC:
                return None
            sealed = rows.readline(MOST_BYTES) + rows.readline(MOST_BYTES)
        return _ENTRY.validate_json(_unsealed(sealed.removesuffix(b"\n")), strict=True)
    except (OSError, ValueError):
        return None


def _begin_of_rows(content: "bytes | mmap.mmap") -> int:
    """Returns where the rows begin in their file, behind the magic, the seal and the entry."""
    return content.find(b"\n", content.find(b"\n", len(MAGIC)) + 1) + 1


def _sealed(text: bytes) -> bytes:
    return b"%s\n%s" % (_digest(text).encode(), text)


def _unsealed(content: bytes) -> bytes:
    """Returns the text that was sealed. Raises ValueError if it is damaged."""
    digest, _, text = content.partition(b"\n")
    if _digest(text).encode() != digest:
        raise ValueError("its digest is that of something else")
    return text


def _indexed(selection: Selects, folder: Path, shard: tuple[str, Stamp]) -> Entry:
    path, version = shard
    return write_rows(rows_file(folder, path, selection), version, scan(path, selection, version.size))


def _or_problem(read: Callable[[File], Result], file: File) -> Result | InputError:
    try:
        return read(file)
    except InputError as error:
        return error


def scan(path: str, selection: Selects, size: int | None = None) -> Content:
    """Returns what the selection finds in a file; `size` is that of the file, if it is known.

    Raises InputError, which names the file, if it cannot be read.
    """

    def read() -> Content:
        with opened(path, size) as file:
            return selection.scan(file, path)

    return persistent(path, read)


def raise_all(problems: Sequence[InputError], shown: int = 5) -> None:
    """Raises one InputError that lists the first of the problems, if there is any.

    It is a StorageError if all of them are.
    """
    if problems:
        kind = StorageError if all(isinstance(problem, StorageError) for problem in problems) else InputError
        more = [f"and {len(problems) - shown} more shards"] if len(problems) > shown else []
        raise kind("\n".join([*map(str, problems[:shown]), *more]))


def _digest(content: bytes | memoryview) -> str:
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def _write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Writes a file whole.

    Several ranks may write the same file: each writes its own copy beside it, and all are equal.
    """
    try:
        with replacing(path) as file:
            file.writelines(parts)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path}: the index cannot be written: {error.strerror}; choose another folder with --to, or with "
        "data.index in the job file"
    )
