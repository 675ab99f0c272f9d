"""Blocks are read ahead, each once a rank, and the batches are those that samples read alone would give."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.loading import pair, plan_of, rank_batches, write_tar
from tests.support.tables import damage
from trainer.config import Data
from trainer.data.arena import Arena
from trainer.data.files import Files
from trainer.data.lanes import Lanes
from trainer.data.loader import Batch
from trainer.data.processes import start_process_server
from trainer.data.sample import Source
from trainer.data.sample_requests import TrainRequests
from trainer.data.source import open_source
from trainer.errors import StorageError

PER_SHARD, SHARDS, BATCH = 40, 12, 16
PAGE = 4096


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    start_process_server()
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        members = []
        for key in (f"{shard:02d}{number:03d}" for number in range(PER_SHARD)):
            members += [(f"{key}.jpg", key.encode() * 2), (f"{key}.txt", f"caption {key}".encode())]
        write_tar(folder / f"{shard:02d}.tar", members)
    return str(folder / f"{{00..{SHARDS - 1:02d}}}.tar")


def opened(shards: object, **data: Any) -> Any:
    return open_source(Data(train=(str(shards),), **data))


Order = tuple[int, int]
"""Samples of a block, and lanes."""


def batches(source: Source, order: Order, **how: Any) -> Iterator[Batch]:
    start_epoch, start_batch = how.pop("start", (0, 0))
    how = {"epochs": 2, "start_epoch": start_epoch, "start_batch": start_batch, **how}
    return rank_batches(source, order, BATCH, **how)


def keys(source: Source, order: Order, ranks: int = 1, **how: Any) -> dict[tuple[int, int], list[str]]:
    """The keys of each global batch in the order of its slots, by epoch and batch; the bytes are theirs."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for rank in range(ranks):
        for batch in batches(source, order, ranks=ranks, rank=rank, **how):
            of_batch = found.setdefault((batch.epoch, batch.batch_in_epoch), {})
            for image, caption, key, position in zip(
                batch.images, batch.captions, batch.keys, batch.positions.tolist(), strict=True
            ):
                assert bytes(image.flatten()[:-1].tolist()) == key.encode() * 2
                assert caption == f"caption {key}"
                of_batch[position] = key
    return {at: [key for _, key in sorted(of_batch.items())] for at, of_batch in sorted(found.items())}


def requests_of(source: Any, order: Order, steps: int, epochs: int, accumulation: int = 1) -> TrainRequests:
    plan = plan_of(1, BATCH, accumulation)
    return TrainRequests(source.shard_sizes(), None, plan, 0, 3, Lanes(*order), steps, epochs, 0, 0)


@pytest.mark.parametrize("name", ["00.tar", "0.parquet"])
def test_a_file_that_is_gone_ends_the_loader_with_its_name(
    shards: str, tables: Path, tmp_path: Path, name: str
) -> None:
    folder = tables if name == "0.parquet" else Path(shards).parent
    path = Path(shutil.copy(folder / name, tmp_path))
    source = opened(path)
    path.unlink()
    with pytest.raises(StorageError, match=rf"{path}: cannot be read"):
        next(batches(source, (7, 16)))


def test_much_that_lies_between_two_samples_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Counting(Files):
        def read(self, path: str, offset: int, size: int) -> bytes:
            sizes.append(size)
            return super().read(path, offset, size)

    monkeypatch.setattr("trainer.data.blocks.Files", Counting)
    members = [
        member
        for number in range(16)
        for member in (
            *pair(f"{number:02d}", f"caption {number:02d}"),
            (f"{number:02d}.npy", bytes(2**19 if number % 4 == 3 else 5000)),
        )
    ]
    (batch,) = batches(opened(write_tar(tmp_path / "0.tar", members)), (16, 16), epochs=1)
    assert sorted(batch.captions) == [f"caption {number:02d}" for number in range(16)]
    assert len(sizes) == 4
    assert sum(sizes) < 16 * 8000


def test_an_arena_gives_back_what_was_put_and_uses_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    one, nothing, two = (arena.put(content) for content in (b"one" * 5000, b"", b"two"))
    assert [arena.read(kept.place, 3) for kept in (one, two)] == [b"one", b"two"]
    assert nothing.size == 0
    arena.free(one)
    small = arena.put(b"small")
    assert small.place != one.place, "pages that are much too large wait for a larger block"
    again = arena.put(b"again" * 2500)
    assert again == one
    assert arena.read(again.place, 5) == b"again"
    held = arena.held_bytes
    monkeypatch.setattr("trainer.data.arena.MOST_SPARE", 0)
    arena.free(again)
    assert arena.held_bytes == held - 4 * PAGE
    assert [arena.read(kept.place, 3) for kept in (small, two)] == [b"sma", b"two"]


def test_a_sample_of_an_arena_is_read_in_as_many_calls_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a call at 2 GiB."""
    arena, pread = Arena(), os.pread
    kept = arena.put(b"0123456789")
    monkeypatch.setattr(os, "pread", lambda file, size, place: pread(file, min(size, 4), place))
    assert arena.read(kept.place, 10) == b"0123456789"
    with pytest.raises(EOFError, match="a block lacks its last 4,990 bytes"):
        arena.read(kept.place, 5000)


ROWS = 40


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of four row groups; the rows of 32 kB of each group are decoded in one piece."""
    start_process_server()
    folder = tmp_path_factory.mktemp("tables")
    for number in range(3):
        keys = [f"{number}{row:04d}" for row in range(4 * ROWS)]
        images = [key.encode() * 6000 for key in keys]
        table = pyarrow.table({"image": images, "caption": [f"caption {key}" for key in keys], "row": keys})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=ROWS, compression="none")
    return folder


def test_rows_of_a_damaged_group_are_bad_samples_and_the_others_come(tables: Path, tmp_path: Path) -> None:
    (path := tmp_path / "0.parquet").write_bytes((tables / "0.parquet").read_bytes())
    damage(path, 1, 1, bytes(12))
    found = list(batches(opened(path), (ROWS, 4), epochs=1, skip_bad=True))
    bad = {error.key for batch in found for error in batch.bad}
    assert {f"1:{row}" for row in range(ROWS)} <= bad
    assert {error.cause for batch in found for error in batch.bad} == {"damaged row group"}
    assert len(found) == 10


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")
def test_batches_that_are_ready_come_while_a_later_block_is_read(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, accumulation = opened(shards), 2
    goes_on, waited_in_vain = Event(), Event()
    blocks: list[set[tuple[int, int]]] = []
    """Those that each micro-batch is the first to need."""
    for request in requests_of(source, (40, 1), 30, 1, accumulation):
        assert request.pieces is not None
        pieces = zip(request.pieces.firsts.tolist(), request.pieces.counts.tolist(), strict=True)
        blocks.append({source.block_of(*piece) for piece in pieces}.difference(*blocks))
    stalled = next(number for number in range(12 * accumulation, len(blocks)) if blocks[number])

    read: Callable[..., Any] = type(source).read_block

    def wait(self: Any, first: int, count: int, arena: Arena) -> Any:
        if (first, count) in blocks[stalled] and not goes_on.wait(120):
            waited_in_vain.set()
        return read(self, first, count, arena)

    monkeypatch.setattr(type(source), "read_block", wait)
    stream = batches(source, (40, 1), accumulation=accumulation, workers=4, epochs=1)
    came = list(islice(stream, stalled // accumulation * accumulation))
    withheld = waited_in_vain.is_set()
    goes_on.set()
    came += stream
    assert not withheld, "a batch was withheld until the block had come"
    expected = batches(opened(shards), (40, 1), accumulation=accumulation, epochs=1)
    assert [batch.keys for batch in came] == [batch.keys for batch in expected]
