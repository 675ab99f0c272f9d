"""Reads parts of files by offset, local or behind a URL of fsspec's.

Storage that fails for a while is asked again. Imports no torch.
"""

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from trainer.config import is_remote
from trainer.config.stores import Address, StoreRow, store_of
from trainer.data.answers import Purpose, asked_wait_s, denied_text, is_absent, is_beyond_end, is_denied
from trainer.data.hops import Hopping
from trainer.data.reading import TALLY, Reading, counted
from trainer.data.storage import client_options, installed_by
from trainer.errors import InputError, StorageError
from trainer.run.retry import Backoff, retried
from trainer.text.wording import many

log = logging.getLogger("clipship.data")
Result = TypeVar("Result")
OPEN_FILES = 64
READ_AHEAD = 2**20
"""Bytes to request at once of what is read forward from a URL."""
WAITS_S: Sequence[float] = tuple(Backoff(0.5, 8.0).wait_s(failure) for failure in range(1, 6))
"""Pauses in seconds before the second, third, ... attempt."""
STORE_WAITS_S: Sequence[float] = (*WAITS_S, 8.0, 8.0, 8.0)
"""Those where data lie behind an address, whose server may be started anew meanwhile."""


_DONE: Mapping[Purpose, str] = {"read": "read", "write": "written"}
_WERE_GOOD = (
    "they were good before, so they have expired or were withdrawn: with new ones the run goes on from its "
    "last checkpoint"
)

_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "updated", "Last-Modified", "last_modified")
"""Names by which clients of fsspec's say which version of a file there is, the surest first."""


_ANSWERING_PARTS: set[str] = set()
"""Servers that have answered a request for a part of a file: where one does not once, it is asked again."""
_LASTING = {errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of a file system that stay."""


class Stamp(NamedTuple):
    """Size and time of change, which tell one version of a file from the next."""

    size: int
    changed: str
    """Time in nanoseconds, or the remote storage's own mark of the version."""


def read_file(
    path: str | Path,
    name: str,
    check: Callable[[os.stat_result], None],
    waits_s: Sequence[float] | None = None,
) -> bytes:
    """Returns the whole file, unless `check` raises for it.

    Raises StorageError, whose text begins with `name`, if the file stays unreadable.
    """

    def read() -> bytes:
        with open_at_once(path) as file:
            check(os.fstat(file.fileno()))
            return file.read()

    return persistent(name, read, waits_s, was_there=True)


def open_at_once(path: str | Path) -> BinaryIO:
    """Opens a file for reading, without waiting for a FIFO's writer.

    A FIFO that nobody writes ends at once; `open` would wait for a writer.
    """
    # The caller closes it.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    os.set_blocking(file.fileno(), True)
    return file


class Files:
    """Keeps the files that were read last open; it is pickled without them.

    Each read names its offset, so forked processes may share a file.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Returns `size` bytes at `offset`.

        Raises StorageError, which names the file, if it cannot be read after some retries, and InputError if
        it ends too early.
        """
        return persistent(path, lambda: self._read(path, offset, size), was_there=True)

    def _read(self, path: str, offset: int, size: int) -> bytes:
        part = _part if is_remote(path) else self._local
        content = counted(lambda begin, end: part(path, begin, end - begin))(offset, offset + size)
        if len(content) < size:
            raise InputError(
                f"{path}: the file now ends {many(size - len(content), 'byte')} too early: it changed after "
                "it was indexed"
            )
        return content

    def _local(self, path: str, offset: int, size: int) -> bytes:
        file = self._open(path)
        try:
            parts = []
            while size and (part := os.pread(file, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
            return b"".join(parts)
        except OSError:
            os.close(self._files.pop(path))  # a stale handle of a network file system stays stale
            raise

    def _open(self, path: str) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(path)
        return self._files[path]

    def __getstate__(self) -> dict[str, object]:
        return {"_files": OrderedDict()}

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)


def persistent(
    path: str,
    read: Callable[[], Result],
    waits_s: Sequence[float] | None = None,
    was_there: bool = False,
    purpose: Purpose = "read",
) -> Result:
    """Returns the result of `read`, which is retried after each of the pauses, or writes, as `purpose` says.

    Raises StorageError, which names the file, if no attempt succeeds. A file that does not exist is an
    InputError, unless it `was_there`.
    """
    least_s = asked_wait_s if waits_s is None else lambda error: 0.0
    waits_s = _waits(path) if waits_s is None else waits_s

    def may_pass(error: Exception) -> bool:
        if _lasts(error) or (purpose == "write" and is_absent(error)):  # the bucket
            return False
        return not _will_not_pass(path, error) and (was_there or not is_denied(path, error))

    def tell(error: Exception, wait_s: float) -> None:
        log.info("%s cannot be %s (%r): trying again in %g s", path, _DONE[purpose], error, wait_s)
        if purpose == "read":
            TALLY.add(Reading(wait_s=wait_s))
        if is_denied(path, error):
            _forget_keys(path)

    try:
        return retried(read, waits_s, may_pass, tell, least_s)
    except Exception as error:
        if _will_not_pass(path, error):
            raise
        if is_denied(path, error):  # whoever asks again later may have been given others
            _forget_keys(path)
        raise _unreadable(path, error, waits_s if may_pass(error) else (), was_there, purpose) from error


def _waits(path: str) -> Sequence[float]:
    return STORE_WAITS_S if "://" in path else WAITS_S


def persistent_each(
    paths: Sequence[str], read: Callable[[str], Result], pool: Executor
) -> list[Result | InputError]:
    """Runs `persistent` for many files.

    Those that fail wait together, so that a thousand missing files take no longer than one. Raises
    InputError at once if a store denies access.
    """

    def attempt(path: str) -> Result | Exception:
        try:
            return read(path)
        except Exception as error:
            if _will_not_pass(path, error) and not isinstance(error, InputError):
                raise
            if is_denied(path, error):
                raise InputError(denied_text(path, error)) from error
            return error

    results: dict[str, Result | Exception] = {}
    left = list(paths)

    def attempt_left() -> None:
        results.update(zip(left, pool.map(attempt, left), strict=True))
        left[:] = [path for path in left if _is_left(results[path])]
        if left:
            raise StorageError

    def tell(_error: Exception, wait_s: float) -> None:
        what = "%s cannot be read, %s among them (%r): trying again in %g s"
        log.info(what, many(len(left), "file"), left[0], results[left[0]], wait_s)

    waits_s = max(map(_waits, paths), key=len, default=())
    with suppress(StorageError):
        retried(attempt_left, waits_s, lambda error: isinstance(error, StorageError), tell)
    return [
        _unreadable(path, result, waits_s) if isinstance(result := results[path], Exception) else result
        for path in paths
    ]


def _is_left(result: object) -> bool:
    return isinstance(result, Exception) and not (isinstance(result, InputError) or _lasts(result))


def _lasts(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _LASTING


def _will_not_pass(path: str, error: Exception) -> bool:
    # aiohttp's errors are not OSErrors, nor are those of most clients of object stores.
    return isinstance(error, InputError | MemoryError) or (
        not isinstance(error, OSError) and not is_remote(path)
    )


def _unreadable(
    path: str,
    error: Exception,
    waits_s: Sequence[float],
    was_there: bool = False,
    purpose: Purpose = "read",
) -> InputError:
    if isinstance(error, InputError):
        return error
    tries = f" after {len(waits_s) + 1} attempts in {sum(waits_s):.0f} s" if waits_s else ""
    if is_denied(path, error):
        text = denied_text(path, error, purpose)
        return StorageError(f"{text}; {_WERE_GOOD}") if was_there else InputError(text)
    kind = InputError if is_absent(error) and not was_there else StorageError
    why = getattr(error, "strerror", None) or repr(error)
    return kind(f"{path}: cannot be {_DONE[purpose]}{tries}: {why}")


def stamp(path: str) -> Stamp:
    """Returns the file's size and time of change. Raises OSError if there is no such file."""
    if not is_remote(path):
        status = os.stat(path)
        return Stamp(status.st_size, str(status.st_mtime_ns))
    info = file_system(path).info(path)
    if info["size"] is None:
        raise InputError(f"{path}: the server does not say how long it is (Content-Length)")
    return Stamp(int(info["size"]), next((str(info[name]) for name in _VERSIONS if info.get(name)), ""))


def opened(path: str, size: int | None = None) -> "closing[BinaryIO]":
    """Opens a file of which parts are read, such as its headers; it is closed with the context.

    `size` is that of the file, if it is known. Of a URL every request is retried on its own.
    """
    if not is_remote(path):
        return closing(open_file(path))
    size = stamp(path).size if size is None else size
    return closing(cast(BinaryIO, Hopping(size, lambda begin, count: Files().read(path, begin, count))))


def open_file(path: str) -> BinaryIO:
    """Opens a file that can seek; what is read forward from a URL is requested in larger parts."""
    if not is_remote(path):
        return open(path, "rb")  # the caller closes it
    return cast(BinaryIO, _opened(path))


def fetch(url: str, most_bytes: int) -> bytes:
    """Returns the content behind a URL, at most `most_bytes` + 1. Raises what fsspec's client raises."""
    with _opened(url) as file:
        return cast(bytes, file.read(most_bytes + 1))


def _opened(path: str) -> Any:
    """Returns fsspec's file behind an address, whose requests are counted."""
    file = file_system(path).open(path, "rb", block_size=READ_AHEAD, cache_type="readahead")
    if cache := getattr(file, "cache", None):  # a file that cannot seek has none
        cache.fetcher = counted(cache.fetcher)
    return file


def _part(path: str, offset: int, size: int) -> bytes:
    """Returns a part of a file behind an address; less than `size` only where the file ends.

    Raises OSError if less has come of it than there is.
    """
    try:
        content = cast(bytes, file_system(path).cat_file(path, start=offset, end=offset + size))
    except Exception as error:
        if not is_beyond_end(error):
            raise
        content = b""
    server = path.split("/", 3)[2]
    if len(content) > size:
        if server in _ANSWERING_PARTS:
            raise OSError(f"more than the {many(size, 'byte')} came that were asked for")
        raise InputError(
            f"{path}: more than the {many(size, 'byte')} came that were asked for: the server does not "
            "answer requests for a part of a file (Range), which reading shards takes"
        )
    if offset:
        _ANSWERING_PARTS.add(server)
    if len(content) < size and stamp(path).size >= offset + size:
        raise OSError(f"only {len(content):,} of {many(size, 'byte')} came")
    return content


def _forget_keys(path: str) -> None:
    """Makes the next request with a new client, which looks for keys again: others may lie there by then."""
    type(file_system(path)).clear_instance_cache()


def _introduce(row: StoreRow | None) -> None:
    """Lets fsspec open the addresses of a store that another one's client serves."""
    import fsspec

    if row is None or not row.client_of or row.protocols[0] in fsspec.registry:
        return
    client = fsspec.get_filesystem_class(row.client_of)
    served = type(row.protocols[0], (client,), {"protocol": row.protocols})
    for protocol in row.protocols:
        fsspec.register_implementation(protocol, served)


def file_system(path: str) -> Any:
    """Returns fsspec's file system for a URL or a path, the same object for each call in a process.

    Raises InputError if a package for it is missing, and for a chain of file systems.
    """
    import fsspec

    if not is_remote(path):
        return fsspec.filesystem("file")
    try:
        _introduce(store_of(path))
        return fsspec.core.url_to_fs(Address(path), **client_options(path))[0]
    except (ImportError, ValueError) as error:
        row = store_of(path)
        advice = f"; python -m pip install {installed_by(row)}" if row else ""
        raise InputError(f"{path}: {error}{advice}") from error
