"""Parts of shards on a node's own disk, so that later epochs and starts read nothing from far storage.

A shard is kept in parts of `PART_BYTES`, so what is kept does not depend on the blocks of an order. Each part
is a file that is whole or not there, with a checksum, under a name that the shard's size and time of change
go into. Ranks and jobs of one user share a folder, which others cannot enter. Parts that were not used for
longest go. No torch.
"""

import logging
import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from trainer.config import Data, is_remote
from trainer.data.reading import TALLY, Reading
from trainer.safe_io.atomic import replacing
from trainer.safe_io.plain import open_plain
from trainer.sysinfo.user_cache import private_folder
from trainer.text.masking import masked

log = logging.getLogger("clipship")
PART_BYTES = 2**22
_SUM_BYTES = 4
_FULL, _ENOUGH = 0.9, 0.8
"""Shares of the limit above which parts are removed, and at which that ends: several ranks write at once."""
_LOOKS = 64
"""Number of times that the folder is looked through while as much as the limit is written."""
_LOCKS = 64
_LEFT_S = 3600
"""Seconds after which nobody is writing a part any more that has not got its name."""


class BlockCache:
    """Parts of shards in a folder, about `limit_bytes` of them."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._written = limit_bytes  # so that the first part that is written looks at what is there
        self._writes = self._tells = True
        self._locks = [Lock() for _ in range(_LOCKS)]
        self._looking = Lock()

    def read(
        self, path: str, version: tuple[int, str], begin: int, end: int, fetch: Callable[[int, int], bytes]
    ) -> bytes:
        """Returns a shard's bytes from `begin` to `end`; `fetch` reads what is not kept yet.

        `version` is the shard's size and time of change. Without a time nothing is kept: a shard that was
        replaced by one of the same size would not show. Raises what `fetch` raises, and nothing else.
        """
        if not version[1]:
            self._tell_unkept(path)
            return fetch(begin, end)
        first = begin // PART_BYTES * PART_BYTES
        parts = []
        for at in range(first, end, PART_BYTES):
            part = self._part(path, version, at, min(version[0], at + PART_BYTES), fetch)
            if part is None:
                return fetch(begin, end)
            parts.append(part)
        return b"".join(parts)[begin - first : end - first]

    def _part(
        self, path: str, version: tuple[int, str], begin: int, end: int, fetch: Callable[[int, int], bytes]
    ) -> bytes | None:
        """Returns a part; None if it is not kept and will not be: then no more than is needed is fetched."""
        place = path if is_remote(path) else os.path.abspath(path)
        name = blake2b(repr((place, *version, begin)).encode(), digest_size=16).hexdigest()
        file = self._folder / name[:2] / f"{name}.part"
        with self._locks[int(name[:8], 16) % _LOCKS]:  # neighbours that two threads read share a part
            content = _kept(file, end - begin)
            if content is not None:
                TALLY.add(Reading(cache_hits=1))
            elif self._writes:
                content = fetch(begin, end)
                self._keep(file, content)
        return content

    def _keep(self, file: Path, content: bytes) -> None:
        if not self._writes:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as made:
                made.write(zlib.crc32(content).to_bytes(_SUM_BYTES, "little"))
                made.write(content)
            self._count(len(content))
        except OSError as error:
            self._writes = False
            _tell(self._folder, error)

    def _tell_unkept(self, path: str) -> None:
        if self._tells:
            self._tells = False
            log.warning(
                "%-12s nothing is kept of %s and of others like it: their server gives neither ETag nor "
                "Last-Modified, so that a shard that was replaced by one of the same size would not show",
                "data.cache",
                masked(path),
            )

    def _count(self, size: int) -> None:
        """Removes what was not used for longest if the folder is full; it looks now and then."""
        with self._looking:
            self._written += size
            if self._written * _LOOKS < self._limit:
                return
            self._written = 0
            _remove_leftovers(self._folder)
            found = sorted(_parts(self._folder))
            total = sum(size for _, size, _ in found)
            if total <= _FULL * self._limit:
                return
            for _, size, file in found:
                with suppress(OSError):
                    os.unlink(file)
                total -= size
                if total <= _ENOUGH * self._limit:
                    return


def cache_of(data: Data) -> BlockCache | None:
    """Returns this user's part of the cache that a job asks for; None for none, and if it cannot be made."""
    if data.cache is None:
        return None
    try:
        Path(data.cache).mkdir(parents=True, exist_ok=True)
        return BlockCache(private_folder(Path(data.cache)), data.cache_gb * 10**9)
    except OSError as error:
        _tell(Path(error.filename or data.cache), error)
        return None


def _tell(folder: Path, error: OSError) -> None:
    log.warning(
        "%-12s nothing more is kept in %s, and is read from where it lies: %s",
        "data.cache",
        folder,
        error.strerror or error,
    )


def _remove_leftovers(folder: Path) -> None:
    """Removes what ranks that were killed had begun to write."""
    for path in folder.glob("*/.*.partial"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _LEFT_S:
                path.unlink()


def _parts(folder: Path) -> list[tuple[float, int, str]]:
    """Returns the last use in seconds, the bytes and the path of each part; others may remove some."""
    found = []
    for path in folder.glob("*/*.part"):
        with suppress(OSError):
            status = path.stat()
            found.append((status.st_mtime, status.st_size, str(path)))
    return found


def _kept(file: Path, size: int) -> bytes | None:
    """Returns a part if it is there, whole and undamaged."""
    try:
        with open(file, "rb", opener=open_plain) as kept:
            total, content = kept.read(_SUM_BYTES), kept.read(size + 1)
        if len(content) != size or zlib.crc32(content).to_bytes(_SUM_BYTES, "little") != total:
            return None
        with suppress(OSError):  # its disk may have become read-only
            os.utime(file)
    except OSError:
        return None
    return content
