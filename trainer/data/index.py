"""The index of shards on disk: where each usable sample lies, so that a run opens any number of shards without reading them. No torch.

A folder holds one file of rows for each shard, mapped when a sample of that shard is first read, and a catalogue of all shards.
Both are sealed with checksums and replaced whole; shards of the same size and time are not read again.
"""

import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex

import numpy as np

from trainer.data.files import opened, persistent, persistent_each, stamp
from trainer.data.tar import PLACE, Content, Rows, Selection, read_headers
from trainer.errors import InputError, Unreadable
from trainer.job import is_remote

FOLDER = ".clipship-index"
MAGIC = b"clipship index 1\n"
DIGEST_BYTES = 16
THREADS = 16
"""On a network file system each header is a round trip."""


@dataclass(frozen=True)
class Entry:
    """One shard in the catalogue."""

    size: int
    changed: str
    samples: int
    digest: str
    """Of its rows."""
    left_out: Mapping[str, int]
    endings: Mapping[str, int]
    flaws: Sequence[tuple[str, str]] = ()
    """Keys and causes, of the first left out."""
    damage: str = ""
    lost: int = 0

    def __len__(self) -> int:
        return self.samples


@dataclass(frozen=True)
class Index:
    """The catalogue of some shards, in the order asked for."""

    folder: Path
    selection: Selection
    paths: tuple[str, ...]
    entries: tuple[Entry, ...]

    def rows(self, number: int) -> Rows:
        """Maps the rows of one shard. InputError where they are damaged, or are not what the catalogue says; Unreadable."""
        path, entry = self.paths[number], self.entries[number]
        file = rows_file(self.folder, path, self.selection)

        def mapped() -> mmap.mmap | None:
            with file.open("rb") as rows:
                return mmap.mmap(rows.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(rows.fileno()).st_size else None

        content = persistent(str(file), mapped, was_there=True)
        if content is None or content[: len(MAGIC)] != MAGIC or _digest(memoryview(content)[len(MAGIC) :]) != entry.digest:
            raise InputError(f"{file}: the index of {path} is damaged: remove the file, and `clipship index` makes it anew")
        keys_at = len(MAGIC) + entry.samples * PLACE.itemsize
        places = np.frombuffer(content, dtype=PLACE, count=entry.samples, offset=len(MAGIC))
        return Rows(places, np.frombuffer(content, dtype=np.uint8, offset=keys_at))


def index_folder(paths: Sequence[str]) -> Path | None:
    """Where the index of these shards is, or may be made: beside the first; None where nobody may write there, and for URLs."""
    if is_remote(paths[0]):
        return None
    beside = Path(paths[0]).absolute().parent
    folder = beside / FOLDER
    return folder if os.access(folder if folder.exists() else beside, os.W_OK) or folder.exists() else None


def stale(paths: Sequence[str], selection: Selection, folder: Path) -> list[str]:
    """The shards that the index lacks or that have changed since. InputError listing those that cannot be looked at."""
    known = read_catalogue(folder, selection)
    with ThreadPoolExecutor(THREADS) as pool:
        stamps = persistent_each(paths, stamp, pool)
    raise_all([found for found in stamps if isinstance(found, InputError)])
    fresh = (
        (entry := known.get(_name(folder, path))) is not None
        and not entry.damage  # it may have been mended with its time kept
        and found == (entry.size, entry.changed)
        and rows_file(folder, path, selection).exists()
        for path, found in zip(paths, stamps, strict=True)
    )
    return [path for path, is_fresh in zip(paths, fresh, strict=True) if not is_fresh]


def index_shards(
    paths: Sequence[str],
    selection: Selection,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
    pool: Executor | None = None,
) -> dict[str, Entry]:
    """Reads the shards' headers, in the pool or in threads, and writes their rows; the catalogue's entries, which are not yet in it.

    `progress(shards done, shards)`. InputError naming every shard that cannot be read; a damaged one has an entry.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    entries: dict[str, Entry] = {}
    problems = []
    with pool or ThreadPoolExecutor(THREADS) as workers:
        jobs = [workers.submit(_index_or_problem, path, selection, folder) for path in paths]
        for path, job in zip(paths, jobs, strict=True):
            found = job.result()
            if isinstance(found, Entry):
                entries[_name(folder, path)] = found
            else:
                problems.append(found)
            if progress:
                progress(len(entries) + len(problems), len(paths))
    if problems:
        write_catalogue(folder, selection, entries)  # what was read need not be read again
    raise_all(problems)
    return entries


def write_catalogue(folder: Path, selection: Selection, entries: Mapping[str, Entry]) -> None:
    """Adds the entries to the catalogue, whole or not at all; jobs that do so at once wait for each other."""
    file = catalogue_file(folder, selection)
    if not entries and file.exists():
        return
    with _locked(file):
        every = {**read_catalogue(folder, selection), **entries}
        text = json.dumps({"selection": selection, "shards": {name: asdict(entry) for name, entry in every.items()}}).encode()
        _write_whole(file, [_digest(text).encode(), b"\n", text])


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """By a file beside it, since it is replaced itself; where there are no locks, or that file is another user's, nothing is locked."""
    with ExitStack() as stack:
        with suppress(OSError):
            lock = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, lock)  # which lets go of it
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def read_catalogue(folder: Path, selection: Selection) -> dict[str, Entry]:
    """Empty where there is none, or a damaged one: then all shards are read again."""
    try:
        digest, _, text = catalogue_file(folder, selection).read_bytes().partition(b"\n")
    except OSError:
        return {}
    if _digest(text) != digest.decode(errors="replace"):
        return {}
    return {name: Entry(**entry) for name, entry in json.loads(text)["shards"].items()}


def open_index(paths: Sequence[str], selection: Selection, folder: Path, fresh: Mapping[str, Entry] | None = None) -> Index:
    """The index of shards that `index_shards` and `write_catalogue` know; reads nothing of the shards.

    `fresh`: entries just made, which another job may have taken out of the catalogue where the file system has no locks.
    """
    known = {**read_catalogue(folder, selection), **(fresh or {})}
    names = [_name(folder, path) for path in paths]
    missing = [path for path, name in zip(paths, names, strict=True) if name not in known]
    if missing:
        raise InputError(
            f"{folder}: the index lacks {len(missing)} of {len(paths)} shards, the first is {missing[0]}: run `clipship index`"
        )
    return Index(folder, selection, tuple(paths), tuple(known[name] for name in names))


def catalogue_file(folder: Path, selection: Selection) -> Path:
    return folder / f"catalogue-{_digest(repr(tuple(selection)).encode())[:8]}.json"


def rows_file(folder: Path, path: str, selection: Selection) -> Path:
    return folder / f"{Path(path).stem}-{_digest(repr((_name(folder, path), *selection)).encode())[:12]}.rows"


def _name(folder: Path, path: str) -> str:
    """Of a shard in the catalogue: relative, so that shards and index may move together."""
    return path if is_remote(path) else os.path.relpath(os.path.abspath(path), folder)


def write_rows(file: Path, rows: Rows) -> str:
    """Returns their digest, which the catalogue keeps."""
    payload = [rows.places.tobytes(), rows.keys.tobytes()]
    _write_whole(file, [MAGIC, *payload])
    return _digest(b"".join(payload))


def _index_or_problem(path: str, selection: Selection, folder: Path) -> Entry | InputError:
    try:
        found, content = scan(path, selection)
        digest = write_rows(rows_file(folder, path, selection), content.rows)
        return Entry(
            *found, len(content), digest, dict(content.left_out), dict(content.endings), content.flaws, content.damage, content.lost
        )
    except InputError as error:
        return error


def scan(path: str, selection: Selection) -> tuple[tuple[int, str], Content]:
    """What a shard's headers say, and of which version of it. InputError that names the shard where it cannot be read."""

    def read() -> tuple[tuple[int, str], Content]:
        found = stamp(path)
        with opened(path) as file:
            return found, read_headers(file, selection)

    return persistent(path, read)


def raise_all(problems: Sequence[InputError], shown: int = 5) -> None:
    """One InputError that lists the first of the problems, where there is any; Unreadable where they all are."""
    if problems:
        kind = Unreadable if all(isinstance(problem, Unreadable) for problem in problems) else InputError
        more = [f"and {len(problems) - shown} more shards"] if len(problems) > shown else []
        raise kind("\n".join([*map(str, problems[:shown]), *more]))


def _digest(content: bytes | memoryview) -> str:
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def _write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Several ranks may write the same file: each its own beside it, the last one stays, and all are equal."""
    beside = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        with beside.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        beside.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: the index cannot be written: {error.strerror}; --to, or data.index of a job, names another folder")
