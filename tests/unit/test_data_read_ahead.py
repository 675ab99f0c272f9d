"""Blocks are read ahead, each once a rank, and the batches are those that samples read alone would give."""

import io
import mmap
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from threading import Event
from typing import ClassVar

import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

from tests.support.range_server import serving
from trainer.config import Data
from trainer.config.batch_plan import BatchPlan
from trainer.data import arena as arena_module
from trainer.data.arena import MOST_SPARE, Arena
from trainer.data.blocks import Block, BlockReader
from trainer.data.columnar import ParquetSource
from trainer.data.files import Files
from trainer.data.lanes import Lanes
from trainer.data.loader import Batch, train_batches
from trainer.data.processes import start_process_server
from trainer.data.read_ahead import ReadAhead
from trainer.data.sample import BadSample, RawSample, Source
from trainer.data.sample_requests import SampleRequest, TrainRequests
from trainer.data.shards import ShardSource
from trainer.data.source import open_source
from trainer.errors import InputError, StorageError

PER_SHARD, SHARDS, BATCH = 40, 12, 16


def plain(raw: RawSample, seed: int) -> Tensor:
    """The file's bytes as a picture, and one that the position decides."""
    assert isinstance(raw.image, bytes)
    return torch.tensor([*raw.image, seed % 256], dtype=torch.uint8).view(1, 1, -1)


def lengths(texts: list[str]) -> Tensor:
    return torch.tensor([[len(text)] for text in texts])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    start_process_server()
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:02d}.tar", "w") as tar:
            for number in range(PER_SHARD):
                key = f"{shard:02d}{number:03d}"
                for ending, content in (("jpg", key.encode() * 2), ("txt", f"caption {key}".encode())):
                    info = tarfile.TarInfo(f"{key}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return str(folder / f"{{00..{SHARDS - 1:02d}}}.tar")


def opened(shards: str, **data: object) -> ShardSource:
    source = open_source(Data(train=(shards,), **data))  # type: ignore[arg-type]
    assert isinstance(source, ShardSource)
    return source


def plan_of(ranks: int, accumulation: int) -> BatchPlan:
    return BatchPlan(ranks, BATCH, BATCH // ranks, BATCH // ranks // accumulation, accumulation)


def batches(
    source: Source,
    order: Lanes,
    ranks: int = 1,
    accumulation: int = 1,
    workers: int = 0,
    rank: int = 0,
    start: tuple[int, int] = (0, 0),
    epochs: int | None = 2,
    most: int | None = None,
) -> Iterator[Batch]:
    return train_batches(
        source, plan=plan_of(ranks, accumulation), rank=rank, seed=3, order=order, pixels=plain,
        tokenizer=lengths, workers=workers, epochs=epochs, start_epoch=start[0], start_batch=start[1],
        most_batches=most,
    )  # fmt: skip


def keys(
    source: ShardSource, order: Lanes, ranks: int = 1, **how: object
) -> dict[tuple[int, int], list[str]]:
    """The keys of each global batch in the order of its slots, by epoch and batch; the bytes are theirs."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for rank in range(ranks):
        for batch in batches(source, order, ranks, rank=rank, **how):  # type: ignore[arg-type]
            of_batch = found.setdefault((batch.epoch, batch.batch_in_epoch), {})
            for image, caption, key, position in zip(
                batch.images, batch.captions, batch.keys, batch.positions.tolist(), strict=True
            ):
                assert bytes(image.flatten()[:-1].tolist()) == key.encode() * 2
                assert caption == f"caption {key}"
                of_batch[position] = key
    return {at: [key for _, key in sorted(of_batch.items())] for at, of_batch in sorted(found.items())}


ORDERS = [Lanes(7, 16), Lanes(7, 4), Lanes(100, 16)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_same_samples_are_in_the_same_batches_on_any_ranks(shards: str, order: Lanes) -> None:
    source = opened(shards)
    alone = keys(source, order)
    steps = PER_SHARD * SHARDS // BATCH
    assert [len(of_batch) for of_batch in alone.values()] == [BATCH] * (2 * steps)
    for epoch in range(2):
        seen = Counter(key for (at, _), of_batch in alone.items() if at == epoch for key in of_batch)
        assert len(seen) == PER_SHARD * SHARDS
        assert set(seen.values()) == {1}
    assert alone[0, 0] != alone[1, 0]
    for ranks in (1, 2, 4):
        for accumulation in (1, 2):
            assert keys(source, order, ranks, accumulation=accumulation) == alone
    resumed = {at: of_batch for at, of_batch in alone.items() if at >= (0, 13)}
    assert keys(source, order, 2, start=(0, 13), accumulation=2) == resumed
    assert keys(source, order, 8, start=(0, 13)) == resumed


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
@pytest.mark.parametrize("workers", [1, 3])
def test_loader_processes_take_the_same_samples(shards: str, workers: int) -> None:
    source, order = opened(shards), ORDERS[0]
    expected = keys(source, order, epochs=1)
    assert keys(source, order, 2, workers=workers, accumulation=2, epochs=1) == expected


class Counting(Files):
    """Counts the reads of every instance."""

    asked: ClassVar[list[tuple[str, int, int]]] = []

    def read(self, path: str, offset: int, size: int) -> bytes:
        self.asked.append((path, offset, size))
        return super().read(path, offset, size)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_each_byte_is_read_once_a_rank_in_whole_blocks(
    shards: str, order: Lanes, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.blocks.Files", Counting)
    monkeypatch.setattr(Counting, "asked", [])
    source = opened(shards)
    for rank in range(ranks):
        list(batches(source, order, ranks, rank=rank, epochs=1))
    data = sum(Path(path).stat().st_size for path in source.index.paths)
    read = sum(size for _, _, size in Counting.asked)
    shared = ranks * order.block_samples * 2048 if order.block_samples == 100 else 0
    assert read <= data + shared
    if ranks == 1:
        assert len(Counting.asked) == len(set(Counting.asked))
    blocks = SHARDS * -(-PER_SHARD // min(order.block_samples, PER_SHARD))
    assert len(Counting.asked) <= blocks + 2 * order.lanes + ranks


def test_memory_is_given_back_when_the_last_batch_of_a_block_has_come(shards: str) -> None:
    source, order, plan = opened(shards), Lanes(7, 16), plan_of(1, 1)
    requests = TrainRequests(source.shard_sizes(), None, plan, 0, 3, order, 30, 3, 0, 0)
    ahead = ReadAhead(source, requests, ahead_bytes=20_000)
    held = []
    for request in ahead:
        assert request is not None
        assert all(place.shift is not None for place in request.places)
        held.append(ahead.arena.held_bytes)
        ahead.done()
    assert len(held) == 90
    # 16 lanes have a block of 7 samples of 2 kB each, in whole pages, and some more are read ahead.
    assert max(held) < (16 + 16 + 6) * 5 * 4096
    assert ahead.arena.held_bytes <= MOST_SPARE * 4 * 4096
    ahead.close()


def test_a_shard_that_cannot_be_read_ends_the_loader_with_its_name(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.files.WAITS_S", ())
    source = opened(shards)

    def fails(self: Files, path: str, offset: int, size: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Files, "_read", fails)
    with pytest.raises(StorageError, match=r"\d\d.tar: cannot be read: Input/output error"):
        list(batches(source, Lanes(7, 16)))


def test_nothing_is_read_that_lies_behind_the_last_batch(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.blocks.Files", Counting)
    monkeypatch.setattr(Counting, "asked", [])
    source = opened(shards)
    found = list(batches(source, Lanes(7, 16), 2, 2, workers=1, epochs=None, most=30))
    assert len(found) == 60
    assert len(Counting.asked) == len(set(Counting.asked)), "blocks of the next epoch"
    assert len(list(batches(source, Lanes(7, 16), 2, 2, start=(0, 25), epochs=None, most=7))) == 14


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_before_one_that_cannot_be_read_still_come(
    shards: str, tmp_path: Path, workers: int
) -> None:
    for path in Path(shards).parent.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    source = opened(str(tmp_path / Path(shards).name))
    (cut := tmp_path / "05.tar").write_bytes(cut.read_bytes()[:60_000])
    stream = batches(source, Lanes(7, 16), workers=workers, epochs=1)
    assert len(list(islice(stream, 18))) == 18
    with pytest.raises(InputError, match=r"05.tar: the file now ends .* too early"):
        next(stream)


def test_the_order_is_not_looked_ahead_without_end_while_the_first_block_is_read(shards: str) -> None:
    source, reads, looked = opened(shards), Event(), 0
    requests = TrainRequests(
        source.shard_sizes(), None, BatchPlan(1, 1, 1, 1, 1), 0, 3, Lanes(40, 1), 480, None, 0, 0
    )

    def counted() -> Iterator[SampleRequest]:
        nonlocal looked
        for request in requests:
            looked += 1
            if looked > 300:
                reads.set()
            yield request

    def slow(path: str, begin: int, end: int) -> bytes:
        assert reads.wait(0.5) or looked
        return BlockReader.bytes_of(source.reader, path, begin, end)

    source.reader.bytes_of = slow  # type: ignore[method-assign]
    ahead = ReadAhead(source, counted())
    next(iter(ahead))
    ahead.close()
    assert looked <= 256


def test_a_shard_that_was_cut_since_is_bad_input(shards: str, tmp_path: Path) -> None:
    cut = tmp_path / "00.tar"
    cut.write_bytes(Path(shards.replace("{00..11}", "00")).read_bytes())
    source = opened(str(cut))
    cut.write_bytes(cut.read_bytes()[:30_000])
    with pytest.raises(InputError, match=r"the file now ends .* too early"):
        list(batches(source, Lanes(7, 16), epochs=1))


def test_a_sample_that_is_too_large_is_neither_read_nor_ends_the_run(shards: str) -> None:
    source = opened(shards, max_member_bytes=12)  # a caption has 13
    with pytest.raises(BadSample, match=r"its .txt has 13 bytes; data.max_member_bytes allows 12"):
        next(batches(source, Lanes(7, 16)))


def test_much_that_lies_between_two_samples_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.blocks.Files", Counting)
    monkeypatch.setattr(Counting, "asked", [])
    members = [
        (f"{number:02d}.{ending}", content)
        for number in range(16)
        for ending, content in (
            ("jpg", b"%02d" % number * 2),
            ("txt", b"caption %02d" % number),
            ("npy", bytes(2**19 if number % 4 == 3 else 5000)),
        )
    ]
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (batch,) = batches(opened(str(tmp_path / "0.tar")), Lanes(16, 16), epochs=1)
    assert sorted(batch.captions) == [f"caption {number:02d}" for number in range(16)]
    assert len(Counting.asked) == 4
    assert sum(size for _, _, size in Counting.asked) < 16 * 8000


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
    assert arena.held_bytes == held - 4 * 4096
    assert [arena.read(kept.place, 3) for kept in (small, two)] == [b"sma", b"two"]


def test_an_arena_goes_by_the_pages_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 64 kB, too: elsewhere a block could not be mapped, and its memory not be given back."""
    assert mmap.ALLOCATIONGRANULARITY == arena_module._PAGE
    monkeypatch.setattr(arena_module, "_PAGE", 2**16)
    arena = Arena()
    assert [arena.put(content).place for content in (b"x", b"y" * 70_000, b"z")] == [0, 2**16, 3 * 2**16]


def test_a_sample_of_an_arena_is_read_in_as_many_calls_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a call at 2 GiB."""
    arena, pread = Arena(), os.pread
    kept = arena.put(b"0123456789")
    monkeypatch.setattr(os, "pread", lambda file, size, place: pread(file, min(size, 4), place))
    assert arena.read(kept.place, 10) == b"0123456789"
    with pytest.raises(EOFError, match="a block lacks its last 4,990 bytes"):
        arena.read(kept.place, 5000)


def test_reading_goes_on_without_end(shards: str) -> None:
    stream = batches(opened(shards), Lanes(7, 16), epochs=None)
    assert [batch.epoch for batch in islice(stream, 90)] == [epoch for epoch in range(3) for _ in range(30)]


def test_a_block_behind_an_address_is_one_request_and_a_refused_one_is_asked_again(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.files.STORE_WAITS_S", (0.01,) * 3)
    with serving(Path(shards).parent) as (address, server):
        source = opened(f"{address}/{Path(shards).name}")
        server.asked.clear()
        server.failures = 3
        found = keys(source, Lanes(7, 16), epochs=1)
        assert found == keys(opened(shards), Lanes(7, 16), epochs=1)
        blocks = SHARDS * -(-PER_SHARD // 7)
        assert len(server.asked) <= blocks + 2 * 16, "one for each block, but for two cuts of each lane"


def test_a_second_epoch_and_a_second_start_read_nothing_from_the_store(shards: str, tmp_path: Path) -> None:
    expected = keys(opened(shards), Lanes(7, 16))
    with serving(Path(shards).parent) as (address, server):
        for _ in range(2):
            source = opened(f"{address}/{Path(shards).name}", cache=str(tmp_path / "cache"))
            server.asked.clear()
            assert keys(source, Lanes(7, 16)) == expected
            asked, server.failures = len(server.asked), 0
        assert asked == 0
    assert len(list((tmp_path / "cache").rglob("*.part"))) == SHARDS


GROUPS, ROWS = 12, 40


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


def captions_of(source: Source, order: Lanes, ranks: int = 1, workers: int = 0) -> list[list[str]]:
    """The captions of each global batch."""
    streams = [batches(source, order, ranks, workers=workers, rank=rank, epochs=1) for rank in range(ranks)]
    of_ranks = [[batch.captions for batch in stream] for stream in streams]
    return [[text for part in parts for text in part] for parts in zip(*of_ranks, strict=True)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
def test_a_row_group_is_read_and_decoded_once_a_rank_for_all_of_its_loader_processes(
    tables: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = Data(train=(str(tables / "{0..2}.parquet"),))
    order, alone = Lanes(ROWS, 4), open_source(data)
    monkeypatch.setattr("trainer.data.loading.InBlocks", type("Nothing", (), {}))
    expected = captions_of(alone, order)
    monkeypatch.undo()
    assert len({text for batch in expected for text in batch}) == GROUPS * ROWS
    with serving(tables) as (url, handler):
        far = Data(train=(f"{url}/{{0..2}}.parquet",), cache=str(tmp_path), filters=('row != "1"',))
        source = open_source(far)
        handler.asked.clear()
        assert captions_of(source, order, workers=3) == expected
        assert len(handler.asked) <= 3 * 4, "in parts of 4 MiB, of which each file has two"
        handler.asked.clear()
        assert captions_of(source, order, ranks=2) == expected
        assert not handler.asked, "all of it is in data.cache"
        source = open_source(far.model_copy(update={"cache": None}))
        handler.asked.clear()
        assert captions_of(source, order, workers=2) == expected
        groups = [asked for asked in handler.asked if _size(asked) > 100_000]
        assert len(groups) == GROUPS, "also those of which several lanes have a piece"
        assert len(handler.asked) <= len(groups) + 3 * 16, "footers, of which a thread may read one more"


def _size(asked: str) -> int:
    begin, end = asked.removeprefix("bytes=").split("-")
    return int(end) - int(begin)


@pytest.mark.parametrize(("keep_mb", "decoded"), [(2, 5 * GROUPS), (512, GROUPS)])
def test_row_groups_stay_for_later_pieces_and_epochs_as_long_as_there_is_room(
    tables: Path, keep_mb: int, decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(Data(train=(str(tables / "{0..2}.parquet"),), row_group_cache_mb=keep_mb))
    assert isinstance(source, ParquetSource)
    seen, read = [], ParquetSource.read_block

    def counted(self: ParquetSource, first: int, count: int, arena: Arena) -> Block:
        seen.append(first)
        return read(self, first, count, arena)

    monkeypatch.setattr(ParquetSource, "read_block", counted)
    requests = TrainRequests(source.shard_sizes(), None, plan_of(1, 1), 0, 3, Lanes(ROWS, 2), 30, 4, 0, 0)
    ahead = ReadAhead(source, requests, ahead_bytes=1)
    group, held = ROWS * 32_000, []
    for _ in ahead:
        held.append(ahead.arena.held_bytes)
        ahead.done()
    ahead.close()
    assert GROUPS <= len(seen) <= decoded
    assert len(set(seen)) == GROUPS
    # Two lanes, what they go on with, and spare pages.
    assert max(held) < min(keep_mb * 2**20, GROUPS * group) + 5 * group + MOST_SPARE * group / 4


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_a_damaged_group_are_bad_samples_and_the_others_come(
    tables: Path, tmp_path: Path, workers: int
) -> None:
    content = bytearray((tables / "0.parquet").read_bytes())
    (tmp_path / "0.parquet").write_bytes(content)
    column = parquet.ParquetFile(tmp_path / "0.parquet").metadata.row_group(1).column(1)
    content[column.data_page_offset : column.data_page_offset + 12] = bytes(12)
    (tmp_path / "0.parquet").write_bytes(content)
    source = open_source(Data(train=(str(tmp_path / "0.parquet"),)))
    stream = train_batches(
        source, plan=plan_of(1, 1), rank=0, seed=3, order=Lanes(ROWS, 4), pixels=plain, tokenizer=lengths,
        workers=workers, epochs=1, skip_bad=True,
    )  # fmt: skip
    found = list(stream)
    bad = {error.key for batch in found for error in batch.bad}
    assert {f"1:{row}" for row in range(ROWS)} <= bad
    assert {error.cause for batch in found for error in batch.bad} == {"damaged row group"}
    assert len(found) == 10


def test_a_table_that_is_gone_ends_the_loader_with_its_name(tables: Path, tmp_path: Path) -> None:
    path = tmp_path / "0.parquet"
    path.write_bytes((tables / "0.parquet").read_bytes())
    source = open_source(Data(train=(str(path),)))
    path.unlink()
    with pytest.raises(StorageError, match=rf"{path}: cannot be read"):
        next(batches(source, Lanes(ROWS, 4)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_batches_that_are_ready_come_while_a_later_block_is_read(
    shards: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, order, plan = opened(shards), Lanes(40, 1), plan_of(1, accumulation)
    goes_on, waited_in_vain, read = Event(), Event(), ShardSource.read_block
    blocks: list[set[tuple[int, int]]] = []
    """Those that each micro-batch is the first to need."""
    for request in TrainRequests(source.shard_sizes(), None, plan, 0, 3, order, 30, 1, 0, 0):
        assert request.pieces is not None
        pieces = zip(request.pieces.firsts.tolist(), request.pieces.counts.tolist(), strict=True)
        blocks.append({source.block_of(*piece) for piece in pieces}.difference(*blocks))
    stalled = next(number for number in range(12 * accumulation, len(blocks)) if blocks[number])

    def slow(self: ShardSource, first: int, count: int, arena: Arena) -> Block:
        if (first, count) in blocks[stalled] and not goes_on.wait(40):
            waited_in_vain.set()
        return read(self, first, count, arena)

    monkeypatch.setattr(ShardSource, "read_block", slow)
    stream = batches(source, order, accumulation=accumulation, workers=4, epochs=1)
    came = list(islice(stream, stalled // accumulation * accumulation))
    withheld = waited_in_vain.is_set()
    goes_on.set()
    came += stream
    assert not withheld, "a batch was withheld until the block had come"
    expected = batches(opened(shards), order, accumulation=accumulation, epochs=1)
    assert [batch.keys for batch in came] == [batch.keys for batch in expected]
