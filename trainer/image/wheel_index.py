"""Reads what a wheel on the package index declares, without downloading the wheel.

It reads the index's listing, and METADATA by HTTP range requests.
"""

import email
import email.message
import html
import io
import re
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

_TIMEOUT_S = 60
_LINUX_WHEEL = (
    r"{name}-(?P<version>\d+(?:\.\d+)*)-(?P<python>cp\d+|py3)-[^-]+-(?P<platform>\S*linux\S*_x86_64|any)\.whl"
)
_GLIBC = re.compile(r"manylinux_(\d+)_(\d+)_x86_64")


@dataclass(frozen=True)
class Release:
    """One version of a package, with what its wheels for Linux on x86_64 declare."""

    version: str
    pythons: tuple[str, ...]
    """Python versions such as "3.11", ascending; ("3",) for a wheel that fits every Python 3."""
    glibc: str
    """Oldest glibc that the wheels run on, by their names; "" if the names do not tell."""
    requires: tuple[str, ...]


def releases(index_url: str, package: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields each version with wheels for Linux, and the URL of its wheel for each Python tag."""
    base = f"{index_url.rstrip('/')}/{package}/"
    page = _get(base).decode()
    pattern = re.compile(_LINUX_WHEEL.format(name=package))
    versions: dict[str, dict[str, str]] = {}
    for href, name in re.findall(r'<a [^>]*href="([^"]+)"[^>]*>([^<]+)</a>', page):
        match = pattern.fullmatch(name.strip())
        if match:
            address = urllib.parse.urljoin(base, html.unescape(href)).partition("#")[0]
            versions.setdefault(match["version"], {})[match["python"]] = address
    yield from versions.items()


def release(version: str, wheels: dict[str, str]) -> Release:
    """Returns what the wheels of one version declare; METADATA is read from one of them."""
    pythons = sorted(
        (_python(tag) for tag in wheels), key=lambda python: [int(part) for part in python.split(".")]
    )
    metadata = _metadata(next(iter(wheels.values())))
    platforms = [named for address in wheels.values() if (named := _GLIBC.search(address))]
    glibc = f"{platforms[0][1]}.{platforms[0][2]}" if platforms else ""
    return Release(version, tuple(pythons), glibc, tuple(metadata.get_all("Requires-Dist") or ()))


def _python(tag: str) -> str:
    return "3" if tag == "py3" else f"3.{tag.removeprefix('cp3')}"


def _metadata(wheel_url: str) -> email.message.Message:
    """Returns the wheel's METADATA.

    It is the file beside the wheel (PEP 658) if the index has it; else it is read by ranges.
    """
    try:
        return email.message_from_bytes(_get(f"{wheel_url}.metadata"))
    except urllib.error.HTTPError as problem:
        if problem.code != 404:
            raise
    with zipfile.ZipFile(io.BufferedReader(_RemoteFile(wheel_url), buffer_size=2**16)) as wheel:
        name = next(name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return email.message_from_bytes(wheel.read(name))


def _get(url: str, **headers: str) -> bytes:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        body: bytes = answer.read()
        return body


class _RemoteFile(io.RawIOBase):
    """A file that is read in parts over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.position = 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_S) as answer:
            self.size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        end = min(self.position + len(buffer), self.size)
        if end <= self.position:
            return 0
        data = _get(self.url, Range=f"bytes={self.position}-{end - 1}")
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)
