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
    r"{name}-(?P<version>\d+(?:\.\d+)*)-(?P<python>cp\d+|py3)-[^-]+"
    r"-(?P<platform>\S*linux\S*_{machine}|any)\.whl"
)
_SDIST = r"{name}-(?P<version>\d+(?:\.\d+)*)\.tar\.gz"
_GLIBC = re.compile(r"manylinux_(\d+)_(\d+)_(?:x86_64|aarch64)")
_LINK = re.compile(r'<a [^>]*href="([^"]+)"[^>]*>([^<]+)</a>')


@dataclass(frozen=True)
class Release:
    """One version of a package, with what its wheels for Linux on one kind of processor declare."""

    version: str
    pythons: tuple[str, ...]
    """Python versions such as "3.11", ascending; ("3",) for a wheel that fits every Python 3."""
    glibc: str
    """Oldest glibc that the wheels run on, by their names; "" if the names do not tell."""
    requires: tuple[str, ...]


def releases(index_url: str, package: str, machine: str = "x86_64") -> Iterator[tuple[str, dict[str, str]]]:
    """Yields each version with wheels for Linux on this processor.

    With it comes the URL of its wheel for each Python tag.
    """
    pattern = _LINUX_WHEEL.format(name=package.replace("-", "_"), machine=machine)
    versions: dict[str, dict[str, str]] = {}
    for match, address in _files(index_url, package, pattern):
        versions.setdefault(match["version"], {})[match["python"]] = address.partition("#")[0]
    yield from versions.items()


def sdists(index_url: str, package: str) -> dict[str, str]:
    """Returns the SHA-256 of each version's source archive; "" if the index does not say it."""
    pattern = _SDIST.format(name=package)
    return {
        match["version"]: address.partition("#sha256=")[2]
        for match, address in _files(index_url, package, pattern)
    }


def _files(index_url: str, package: str, pattern: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yields each file of a package whose name matches the pattern, with its URL."""
    base = f"{index_url.rstrip('/')}/{package}/"
    for href, name in _LINK.findall(_get(base).decode()):
        if match := re.fullmatch(pattern, name.strip()):
            yield match, urllib.parse.urljoin(base, html.unescape(href))


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
