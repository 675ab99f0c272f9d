"""Whole files in object storage or in a folder: written and compared, read, listed, removed. No torch.

All that Clipship writes to a store is written here. A file is there whole or not at all: a store shows an
upload when it is complete, and a path's file is renamed. Faults are waited for as those of reading are.
"""

import hashlib
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from trainer.config import is_remote
from trainer.config.stores import STORES, WEB
from trainer.data.answers import is_absent
from trainer.data.files import file_system, persistent
from trainer.errors import InputError
from trainer.safe_io.atomic import replacing
from trainer.safe_io.plain import MOST_BYTES, open_regular

_PART = 16 * 2**20
"""Bytes of one request for what is read back or fetched."""
_PROBE = b"Clipship looks whether it may write here. This can be removed.\n"
_SHORT_WAITS_S = (0.5, 1.0)
"""Pauses where a person waits for the answer."""


class Seal(NamedTuple):
    """Size and SHA-256 of a file, by which two are known to be equal."""

    size: int
    sha256: str


def seal_of(source: Path | bytes) -> Seal:
    """Returns the seal of a local file or of its content. Raises OSError."""
    if isinstance(source, bytes):
        return Seal(len(source), hashlib.sha256(source).hexdigest())
    with open(source, "rb", opener=open_regular) as file:
        return Seal(source.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def put(
    source: Path | bytes,
    address: str,
    seal: Seal | None = None,
    *,
    private: bool = False,
    waits_s: Sequence[float] | None = None,
) -> None:
    """Writes a file, then reads it back and compares it with `seal`, which is by default the source's.

    Nothing is sent if the address has it already. With `private`, only the owner may read a path's file.
    Raises StorageError, which names the address, if that cannot be done after some retries, InputError if the
    store denies it, and OSError if the source cannot be read.
    """
    if address.startswith(WEB):
        known = ", ".join(row.addresses for row in STORES)
        raise InputError(f"{address}: a web server takes no files: give a folder, or an address at {known}")
    wanted = seal or seal_of(source)

    def write() -> None:
        if _holds(address, wanted):
            return
        _send(source, address, private=private)
        if not _holds(address, wanted):
            if seal_of(source) != wanted:
                raise InputError(
                    f"{address}: its source here is damaged: its checksum is another than when it was made"
                )
            raise OSError("what was read back differs from what was written")

    persistent(address, write, waits_s, purpose="write")


def get(address: str, path: Path) -> None:
    """Fetches a file to a path, whole. Raises InputError if it is absent or denied, and StorageError."""

    def fetch() -> None:
        with replacing(path) as file:
            for part in _parts(address, _size(address)):
                file.write(part)

    persistent(address, fetch)


def read(address: str, most: int | None = MOST_BYTES) -> bytes | None:
    """Returns the content of a file; None if there is none.

    Raises InputError, also for one of more than `most` bytes, and StorageError.
    """

    def content() -> bytes | None:
        with _absent_passed_over():
            size = _size(address)
            if most is not None and size > most:
                raise InputError(
                    f"{address}: its size in bytes is {size:,}, above the limit of {most:,} for such a file"
                )
            return b"".join(_parts(address, size))
        return None

    return persistent(address, content)


def names(address: str) -> list[str]:
    """Returns the names directly below an address, sorted; none if nothing is there. Raises as `read`."""

    def listed() -> list[str]:
        files = file_system(address)
        files.invalidate_cache()
        with _absent_passed_over():
            found = (path.rstrip("/").rpartition("/")[2] for path in files.ls(address, detail=False))
            return sorted(set(found) - {address.rpartition("/")[2], ""})
        return []

    return persistent(address, listed)


def remove(address: str) -> None:
    """Removes a file, or all below an address, if there is anything. Raises InputError and StorageError.

    `*`, `?` and brackets in an address are taken as they are: fsspec's own `rm` takes them for a pattern.
    """

    def gone() -> None:
        files = file_system(address)
        files.invalidate_cache()
        if not is_remote(address):
            with _absent_passed_over():
                files.rm(address, recursive=True)
            return
        paths: list[str] = []
        with _absent_passed_over():
            paths = files.find(address)
        for path in paths:
            with _absent_passed_over():  # another may have removed it since
                files.rm_file(path)

    persistent(address, gone, purpose="write")


def check_writable(address: str) -> None:
    """Writes a small file below an address of object storage, reads it back and removes it.

    Raises InputError if the store denies it, or has no such bucket, and StorageError if it does not answer.
    """
    probe = f"{address}/.clipship-{secrets.token_hex(8)}"
    put(_PROBE, probe, waits_s=_SHORT_WAITS_S)
    remove(probe)


@contextmanager
def _absent_passed_over() -> Iterator[None]:
    """Ends the block quietly if a file does not exist; other errors of fsspec's clients pass."""
    try:
        yield
    except Exception as error:
        if not is_absent(error):
            raise


def _size(address: str) -> int:
    files = file_system(address)
    files.invalidate_cache()  # it remembers what this process has listed, and others write, too
    return int(files.info(address)["size"] or 0)


def _parts(address: str, size: int) -> Iterator[bytes]:
    files = file_system(address)
    for begin in range(0, size, _PART):
        part = files.cat_file(address, start=begin, end=min(begin + _PART, size))
        if len(part) != min(_PART, size - begin):
            raise OSError(f"only {len(part):,} of {min(_PART, size - begin):,} bytes came")
        yield part


def _holds(address: str, seal: Seal) -> bool:
    with _absent_passed_over():
        if _size(address) != seal.size:
            return False
        digest = hashlib.sha256()
        for part in _parts(address, seal.size):
            digest.update(part)
        return digest.hexdigest() == seal.sha256
    return False


def _send(source: Path | bytes, address: str, *, private: bool) -> None:
    if is_remote(address):
        files = file_system(address)
        if isinstance(source, bytes):
            files.pipe_file(address, source)
        else:
            files.put_file(str(source), address)
        return
    path = Path(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode=0o600 if private else 0o666) as file:
        if isinstance(source, bytes):
            file.write(source)
        else:
            with open(source, "rb", opener=open_regular) as given:
                shutil.copyfileobj(given, file, _PART)
