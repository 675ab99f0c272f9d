"""Headers of the steps that the ranks of a node keep in memory, and which of these steps are whole.

A step is a file of bytes, of which each rank of the node writes its own range, and one header for each range.
A rank removes its header before it touches the bytes and writes it anew, at once and whole, when they are
complete: so a rank that is killed while it writes leaves no header, and the step is not whole. The bytes of
two steps fit, and the newer one overwrites the older. Checksums are compared by who reads the bytes,
`trainer.checkpoint.memory_state`. No torch.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.safe_io.plain import read_as

BUFFERS = 2
_HEADER = re.compile(r"(?P<layout>[0-9a-f]{16})-(?P<buffer>\d)-\d{5}-of-\d{5}\.json")


@dataclass(frozen=True)
class Header:
    """Header of one rank's range of the bytes of a step."""

    start: str
    """Id of the start of the run."""
    layout: str
    """Digest of the layout: names, types, shapes and places of all tensors."""
    buffer: int
    """Number of the file with the bytes, 0 or 1."""
    step: int
    part: int
    """Number of the range, from 0 to `parts` - 1."""
    parts: int
    checksum: str
    """Checksum of the range."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Small values of the step: its record, and how often steps are kept."""

    @property
    def name(self) -> str:
        """Name of the header's file."""
        return f"{self.layout}-{self.buffer}-{self.part:05d}-of-{self.parts:05d}.json"


@dataclass(frozen=True)
class WholeStep:
    """A step of which every part has its header; `headers` are in the order of the parts."""

    step: int
    headers: tuple[Header, ...]

    @property
    def layout(self) -> str:
        return self.headers[0].layout

    @property
    def buffer(self) -> int:
        return self.headers[0].buffer


def write_header(folder: Path, header: Header) -> None:
    """Writes a header; it is there as a whole or not at all. Raises OSError."""
    beside = folder / f".{header.name}"
    # Memory is not flushed, and no reader sees this name.
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(header), file)
    os.replace(beside, folder / header.name)


def whole_steps(folder: Path, start: str) -> list[WholeStep]:
    """Returns the whole steps that this start keeps in the folder, the newest first.

    A folder that is missing or cannot be read has none; headers of another start do not count.
    """
    groups: dict[tuple[str, int, int, int], list[Header]] = {}
    for header in _headers(folder):
        if header.start == start:
            key = (header.layout, header.buffer, header.step, header.parts)
            groups.setdefault(key, []).append(header)
    whole = [
        WholeStep(step, tuple(sorted(headers, key=lambda header: header.part)))
        for (_, _, step, parts), headers in groups.items()
        if {header.part for header in headers} == set(range(parts))
    ]
    return sorted(whole, key=lambda step: step.step, reverse=True)


def newest_step(folder: Path, start: str) -> int:
    """Returns the newest whole step that this start keeps in the folder; 0 if there is none."""
    steps = whole_steps(folder, start)
    return steps[0].step if steps else 0


def data_file(layout: str, buffer: int) -> str:
    """Returns the name of the file with the bytes of one buffer in this layout."""
    return f"{layout}-{buffer}.data"


def layout_file(layout: str) -> str:
    """Returns the name of the file with the layout of this digest."""
    return f"{layout}.layout"


def remove_headers(folder: Path, headers: Iterable[str]) -> None:
    """Removes headers by their names, so that their steps are no longer whole."""
    for name in headers:
        with suppress(FileNotFoundError):
            (folder / name).unlink()


def headers_of_buffer(folder: Path, buffer: int) -> list[str]:
    """Returns the names of all headers of one buffer, whatever their layout and number of parts."""
    matches = (_HEADER.fullmatch(name) for name in os.listdir(folder))
    return [match[0] for match in matches if match and int(match["buffer"]) == buffer]


def _headers(folder: Path) -> list[Header]:
    found = []
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if _HEADER.fullmatch(name) and (header := read_header(folder, name)) is not None:
                found.append(header)
    return found


def read_header(folder: Path, name: str) -> Header | None:
    """Returns the header of that name; None if there is none, or not a whole one."""
    header = read_as(Header, folder / name)
    with suppress(ValueError, TypeError):  # of texts in place of numbers
        return header if header is not None and header.name == name else None
    return None
