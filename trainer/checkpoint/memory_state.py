"""Newest steps of a run in the node's memory: files that each rank of the node fills in part.

The folder is the supervisors' (`trainer.world.state_folder`), so the files outlive the ranks. Two steps
have room; the newer overwrites the older, so one whole step is always there. Headers say which steps are
whole (`trainer.world.state_parts`). Whoever reads a step checks its checksum, so bytes that are half
written or damaged are never taken for a step.
"""

import hashlib
import json
import mmap
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.memory_layout import Layout, block_sums, tensors_of
from trainer.checkpoint.state import TrainState, put_optimizer
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import open_plain, read_json
from trainer.world.state_parts import (
    BUFFERS,
    Header,
    WholeStep,
    data_file,
    headers_of_buffer,
    layout_file,
    read_header,
    remove_headers,
    whole_steps,
    write_header,
)


class PartWriter:
    """One rank's range of the bytes of both buffers, for one layout."""

    def __init__(self, folder: Path, start: str, layout: Layout, part: int, parts: int) -> None:
        """Takes the memory for the range. Raises OSError, with ENOSPC if there is too little."""
        self.layout = layout
        self._folder, self._start, self._part, self._parts = folder, start, part, parts
        self.begin, self.end = layout.range_of(part, parts)
        path = folder / layout_file(layout.digest)
        if not path.exists():
            write_json(path, layout.to_json())
        self.rows: list[Tensor] = []
        """This rank's range of each buffer, uint8 [end - begin]."""
        self._maps = [self._open(buffer) for buffer in range(BUFFERS)]
        self._cleared: set[int] = set()
        self._unseen: set[str] = set()
        """Headers that have not told of the step sealed last yet."""

    def _open(self, buffer: int) -> mmap.mmap:
        path = self._folder / data_file(self.layout.digest, buffer)
        flags = os.O_RDWR | os.O_CREAT
        descriptor = open_plain(path, flags, 0o600)
        try:
            if os.fstat(descriptor).st_size < self.layout.size:
                os.ftruncate(descriptor, self.layout.size)
            if self.end > self.begin:
                # A page that the memory has no room for would end the rank with a bus error when written.
                os.posix_fallocate(descriptor, self.begin, self.end - self.begin)
            memory = mmap.mmap(descriptor, self.layout.size)
        finally:
            os.close(descriptor)
        self.rows.append(torch.frombuffer(memory, dtype=torch.uint8)[self.begin : self.end])
        return memory

    def open_buffer(self, buffer: int) -> Tensor:
        """Returns this rank's range of a buffer to write to; its step is no longer whole from now on."""
        own = self._header(buffer, 0, "", {}).name
        stale = {own}
        if buffer not in self._cleared:  # others may have written it, in another number of parts
            same = f"{self.layout.digest}-{buffer}-", f"-of-{self._parts:05d}.json"
            stale |= {
                name
                for name in headers_of_buffer(self._folder, buffer)
                if not (name.startswith(same[0]) and name.endswith(same[1]))
            }
            self._cleared.add(buffer)
            self._remove_other_bytes(buffer)
        remove_headers(self._folder, stale)
        return self.rows[buffer]

    def _remove_other_bytes(self, buffer: int) -> None:
        """Removes the bytes of another layout: an optimizer gets more state when more parameters train."""
        for path in self._folder.glob(data_file("*", buffer)):
            if path.name != data_file(self.layout.digest, buffer):
                path.unlink(missing_ok=True)

    def seal(self, buffer: int, step: int, about: Mapping[str, Any]) -> None:
        """Marks this rank's range of a buffer as complete, with the checksum of its bytes."""
        checksum = _checksum(block_sums(self.rows[buffer]))
        its = self._header(buffer, step, checksum, about)
        write_header(self._folder, its)
        self._unseen = {replace(its, part=part).name for part in range(self._parts)}

    def others_have(self, step: int) -> bool:
        """Returns whether all ranks of the node have completed the step that this one has sealed last.

        Headers are read until they tell of it, and then not again.
        """
        for name in [*self._unseen]:
            its = read_header(self._folder, name)
            if its is not None and (its.start, its.step) == (self._start, step):
                self._unseen.remove(name)
        return not self._unseen

    def _header(self, buffer: int, step: int, checksum: str, about: Mapping[str, Any]) -> Header:
        return Header(self._start, self.layout.digest, buffer, step, self._part, self._parts, checksum, about)


@dataclass(frozen=True)
class Kept:
    """A whole step in the node's memory whose bytes have the checksums of its headers."""

    step: int
    digest: str
    """Digest of layout and bytes; equal on nodes with equal states."""
    buffer: int
    about: Mapping[str, Any]
    layout: Layout
    folder: Path
    skipped: Mapping[str, int]
    """Number of samples that the node's ranks have skipped, by cause."""

    @property
    def skipped_before(self) -> Mapping[str, int]:
        """Number of samples that all ranks had skipped before those in `skipped`, by cause."""
        before: Mapping[str, int] = self.about["skipped"]["before"]
        return before

    def load(self, train: TrainState) -> dict[str, float]:
        """Copies weights and optimizer into the state; returns the changing numbers of the scaler's state.

        Raises RuntimeError if it is another model's.
        """
        memory = _mapped(self.folder, self.layout, self.buffer)
        weights, optimizer, scaler = tensors_of(self.layout, torch.frombuffer(memory, dtype=torch.uint8))
        train.model.load_state_dict(weights)
        own = {name: {key: value.clone() for key, value in of.items()} for name, of in optimizer.items()}
        put_optimizer(own, train.shards.parameters, train.optimizer)
        return scaler


def kept_steps(folder: Path, start: str) -> list[Kept]:
    """Returns the whole steps of this start in the folder whose bytes are as they were written, newest first.

    It reads all bytes of both steps: some 0.1 s for each GB.
    """
    found = []
    for whole in whole_steps(folder, start):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(_verified(folder, whole))
    return found


def forget(folder: Path, start: str, but: int) -> None:
    """Makes all steps of this start in the folder but one no longer whole; 0 leaves none."""
    for step in whole_steps(folder, start):
        if step.step != but:
            remove_headers(folder, (header.name for header in step.headers))


def clear(folder: Path, start: str) -> None:
    """Gives up all steps of this start in the folder, and the memory that they take."""
    forget(folder, start, 0)
    for buffer in range(BUFFERS):
        for path in folder.glob(data_file("*", buffer)):
            path.unlink(missing_ok=True)


def bytes_kept(folder: Path) -> int:
    """Returns the bytes that the steps in the folder take already."""
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.data"))


def _verified(folder: Path, whole: WholeStep) -> Kept:
    """Returns the step. Raises ValueError if its bytes differ from what its headers say, OSError."""
    layout = Layout.from_json(read_json(folder / layout_file(whole.layout)))
    if layout.digest != whole.layout:
        raise ValueError("the layout is another one")
    memory = _mapped(folder, layout, whole.buffer)
    row = torch.frombuffer(memory, dtype=torch.uint8)
    parts = len(whole.headers)
    sums = []
    for header in whole.headers:
        begin, end = layout.range_of(header.part, parts)
        sums.append(block_sums(row[begin:end]))
        if _checksum(sums[-1]) != header.checksum:
            raise ValueError("the bytes have another checksum")
    about = whole.headers[0].about
    own = (header.about["skipped"]["own"] for header in whole.headers)
    skipped: Counter[str] = sum(map(Counter, own), Counter())
    seal = [whole.layout, whole.step, _checksum(torch.cat(sums))]
    digest = hashlib.sha256(json.dumps(seal, sort_keys=True).encode()).hexdigest()[:16]
    return Kept(whole.step, digest, whole.buffer, about, layout, folder, skipped)


def _mapped(folder: Path, layout: Layout, buffer: int) -> mmap.mmap:
    """Returns the bytes of a buffer as a private copy. Raises OSError, ValueError if it is too short."""
    with open(folder / data_file(layout.digest, buffer), "rb", opener=open_plain) as file:
        return mmap.mmap(file.fileno(), layout.size, access=mmap.ACCESS_COPY)


def _checksum(sums: Tensor) -> str:
    return hashlib.sha256(sums.numpy().tobytes()).hexdigest()
