"""Blocks are read ahead, each once a rank, and the batches are those that samples read alone would give."""

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.loading import pair, plan_of, rank_batches, write_tar
from tests.support.range_server import serving
from tests.support.tables import damage
from trainer.config import Data
from trainer.data.arena import Arena
from trainer.data.files import Files
from trainer.data.lanes import Lanes
from trainer.data.loader import Batch
from trainer.data.processes import start_process_server
from trainer.data.read_ahead import ReadAhead
from trainer.data.sample import Source
from trainer.data.sample_requests import TrainRequests
from trainer.data.source import open_source
from trainer.errors import InputError, StorageError

PER_SHARD, SHARDS, BATCH = 40, 12, 16
PAGE, SPARE = 4096, 64


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    start_process_server()
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        keys = [f"{shard:02d}{number:03d}" for number in range(PER_SHARD)]
        contents = [(("jpg", key.encode() * 2), ("txt", f"caption {key}".encode())) for key in keys]
        members = [
            (f"{key}.{ending}", content)
            for key, of_key in zip(keys, contents, strict=True)
            for ending, content in of_key
        ]
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


ORDERS = [(7, 16), (7, 4), (100, 16)]


@pytest.mark.parametrize("order", ORDERS)
def test_the_same_samples_are_in_the_same_batches_on_any_ranks(shards: str, order: Order) -> None:
    source = opened(shards)
    alone = keys(source, order)
    steps = PER_SHARD * SHARDS // BATCH
    assert [len(of_batch) for of_batch in alone.values()] == [BATCH] * (2 * steps)
    for epoch in range(2):
        seen = Counter(key for (at, _), of_batch in alone.items() if at == epoch for key in of_batch)
        assert len(seen) == PER_SHARD * SHARDS
        assert set(seen.values()) == {1}
    assert alone[0, 0] != alone[1, 0]
    for ranks, accumulation in ((1, 2), (2, 1), (4, 2)):
        assert keys(source, order, ranks, accumulation=accumulation) == alone
    resumed = {at: of_batch for at, of_batch in alone.items() if at >= (0, 13)}
    assert keys(source, order, 2, start=(0, 13), accumulation=2) == resumed


def test_loader_processes_take_the_same_samples(shards: str) -> None:
    source, order = opened(shards), ORDERS[0]
    expected = keys(source, order, epochs=1)
    assert keys(source, order, workers=2, accumulation=2, epochs=1) == expected


class Counting(Files):
    """Counts the reads of every instance."""

    asked: ClassVar[list[tuple[str, int, int]]] = []

    def read(self, path: str, offset: int, size: int) -> bytes:
        self.asked.append((path, offset, size))
        return super().read(path, offset, size)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    monkeypatch.setattr("trainer.data.blocks.Files", Counting)
    monkeypatch.setattr(Counting, "asked", [])
    return Counting.asked


@pytest.mark.parametrize(("order", "ranks"), [((7, 16), 4), ((7, 4), 1), ((100, 16), 4), ((100, 16), 1)])
def test_each_byte_is_read_once_a_rank_in_whole_blocks(
    shards: str, order: Order, ranks: int, asked: list[tuple[str, int, int]]
) -> None:
    source, (block, lanes) = opened(shards), order
    for rank in range(ranks):
        list(batches(source, order, ranks=ranks, rank=rank, epochs=1))
    data = sum(Path(path).stat().st_size for path in source.index.paths)
    assert sum(size for *_, size in asked) <= data + (ranks * block * 2048 if block == 100 else 0)
    if ranks == 1:
        assert len(asked) == len(set(asked))
    assert len(asked) <= SHARDS * -(-PER_SHARD // min(block, PER_SHARD)) + 2 * lanes + ranks


def requests_of(source: Any, order: Order, steps: int, epochs: int, accumulation: int = 1) -> TrainRequests:
    plan = plan_of(1, BATCH, accumulation)
    return TrainRequests(source.shard_sizes(), None, plan, 0, 3, Lanes(*order), steps, epochs, 0, 0)


def test_memory_is_given_back_when_the_last_batch_of_a_block_has_come(shards: str) -> None:
    source = opened(shards)
    ahead, held = ReadAhead(source, requests_of(source, (7, 16), 30, 3), ahead_bytes=20_000), []
    for request in ahead:
        assert request is not None
        assert all(place.shift is not None for place in request.places)
        held.append(ahead.arena.held_bytes)
        ahead.done()
    assert len(held) == 90
    # 16 lanes have a block of 7 samples of 2 kB each, in whole pages, and some more are read ahead.
    assert max(held) < (16 + 16 + 6) * 5 * PAGE
    assert ahead.arena.held_bytes <= SPARE * 4 * PAGE
    ahead.close()


@pytest.mark.parametrize("name", ["0.tar", "0.parquet"])
def test_a_file_that_is_gone_ends_the_loader_with_its_name(
    shards: str, tables: Path, tmp_path: Path, name: str
) -> None:
    (path := tmp_path / name).write_bytes(
        Path(tables / name if name == "0.parquet" else shards.replace("{00..11}", "00")).read_bytes()
    )
    source = opened(path)
    path.unlink()
    with pytest.raises(StorageError, match=rf"{path}: cannot be read"):
        next(batches(source, (7, 16)))


def test_nothing_is_read_that_lies_behind_the_last_batch(
    shards: str, asked: list[tuple[str, int, int]]
) -> None:
    source, how = opened(shards), {"ranks": 2, "accumulation": 2, "epochs": None}
    assert len(list(batches(source, (7, 16), most_batches=30, **how))) == 60
    assert len(asked) == len(set(asked)), "blocks of the next epoch"
    assert len(list(batches(source, (7, 16), start=(0, 25), most_batches=7, **how))) == 14


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_before_one_that_cannot_be_read_still_come(
    shards: str, tmp_path: Path, workers: int
) -> None:
    for path in Path(shards).parent.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    source = opened(tmp_path / Path(shards).name)
    (cut := tmp_path / "05.tar").write_bytes(cut.read_bytes()[:60_000])
    stream = batches(source, (7, 16), workers=workers, epochs=1)
    assert len(list(islice(stream, 18))) == 18
    with pytest.raises(InputError, match=r"05.tar: the file now ends .* too early"):
        next(stream)


def test_much_that_lies_between_two_samples_is_not_read(
    tmp_path: Path, asked: list[tuple[str, int, int]]
) -> None:
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
    assert len(asked) == 4
    assert sum(size for _, _, size in asked) < 16 * 8000


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


def test_an_arena_goes_by_the_pages_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 64 kB, too: elsewhere a block could not be mapped, and its memory not be given back."""
    for page in (mmap.ALLOCATIONGRANULARITY, 2**16):
        arena = Arena()
        places = [arena.put(content).place for content in (b"x", b"y" * (page + 1), b"z")]
        assert places == [0, page, 3 * page]
        monkeypatch.setattr("trainer.data.arena._PAGE", 2**16)


def test_a_sample_of_an_arena_is_read_in_as_many_calls_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a call at 2 GiB."""
    arena, pread = Arena(), os.pread
    kept = arena.put(b"0123456789")
    monkeypatch.setattr(os, "pread", lambda file, size, place: pread(file, min(size, 4), place))
    assert arena.read(kept.place, 10) == b"0123456789"
    with pytest.raises(EOFError, match="a block lacks its last 4,990 bytes"):
        arena.read(kept.place, 5000)


def test_reading_goes_on_without_end(shards: str) -> None:
    stream = batches(opened(shards), (7, 16), epochs=None)
    assert [batch.epoch for batch in islice(stream, 90)] == [epoch for epoch in range(3) for _ in range(30)]


def test_a_block_behind_an_address_is_one_request_and_nothing_in_a_second_epoch_and_start(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.files.STORE_WAITS_S", (0.01,) * 3)
    expected = keys(opened(shards), (7, 16))
    with serving(Path(shards).parent) as (address, server):
        far = f"{address}/{Path(shards).name}"
        source = opened(far)
        server.asked.clear()
        server.failures = 3  # each is asked again
        assert keys(source, (7, 16), epochs=1) == {at: of for at, of in expected.items() if at < (1, 0)}
        blocks = SHARDS * -(-PER_SHARD // 7)
        assert len(server.asked) <= blocks + 2 * 16, "one for each block, but for two cuts of each lane"
        for _ in range(2):
            source = opened(far, cache=str(tmp_path / "cache"))
            server.asked.clear()
            assert keys(source, (7, 16)) == expected
        assert not server.asked
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


def captions_of(source: Source, ranks: int = 1, workers: int = 0) -> list[list[str]]:
    """The captions of each global batch."""
    how = {"ranks": ranks, "workers": workers, "epochs": 1}
    streams = [batches(source, (ROWS, 4), rank=rank, **how) for rank in range(ranks)]
    of_ranks = [[batch.captions for batch in stream] for stream in streams]
    return [[text for part in parts for text in part] for parts in zip(*of_ranks, strict=True)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
def test_a_row_group_is_read_and_decoded_once_a_rank_for_all_of_its_loader_processes(
    tables: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = Data(train=(str(tables / "{0..2}.parquet"),))
    monkeypatch.setattr("trainer.data.loading.InBlocks", type("Nothing", (), {}))
    expected = captions_of(open_source(data))
    monkeypatch.undo()
    assert len({text for batch in expected for text in batch}) == GROUPS * ROWS
    with serving(tables) as (url, handler):
        far = Data(train=(f"{url}/{{0..2}}.parquet",), cache=str(tmp_path), filters=('row != "1"',))
        source = open_source(far)
        handler.asked.clear()
        assert captions_of(source, workers=3) == expected
        assert len(handler.asked) <= 3 * 4, "in parts of 4 MiB, of which each file has two"
        handler.asked.clear()
        assert captions_of(source, ranks=2) == expected
        assert not handler.asked, "all of it is in data.cache"
        source = open_source(far.model_copy(update={"cache": None}))
        handler.asked.clear()
        assert captions_of(source) == expected
        groups = [asked for asked in handler.asked if _size(asked) > 100_000]
        assert len(groups) == GROUPS, "also those of which several lanes have a piece"
        assert len(handler.asked) <= len(groups) + 3 * 16, "footers, of which a thread may read one more"


def _size(asked: str) -> int:
    begin, end = asked.removeprefix("bytes=").split("-")
    return int(end) - int(begin)


Read = Callable[[Any, int, int, Arena], Any]


def watched(source: Any, monkeypatch: pytest.MonkeyPatch, before: Callable[[int, int], object]) -> None:
    """Calls `before` with what a block of the source begins with, and with its size, before it is read."""
    read: Read = type(source).read_block

    def told(self: Any, first: int, count: int, arena: Arena) -> Any:
        before(first, count)
        return read(self, first, count, arena)

    monkeypatch.setattr(type(source), "read_block", told)


@pytest.mark.parametrize(("keep_mb", "decoded"), [(2, 5 * GROUPS), (512, GROUPS)])
def test_row_groups_stay_for_later_pieces_and_epochs_as_long_as_there_is_room(
    tables: Path, keep_mb: int, decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = opened(tables / "{0..2}.parquet", row_group_cache_mb=keep_mb), list[int]()
    watched(source, monkeypatch, lambda first, _: seen.append(first))
    ahead = ReadAhead(source, requests_of(source, (ROWS, 2), 30, 4), ahead_bytes=1)
    group, held = ROWS * 32_000, []
    for _ in ahead:
        held.append(ahead.arena.held_bytes)
        ahead.done()
    ahead.close()
    assert GROUPS <= len(seen) <= decoded
    assert len(set(seen)) == GROUPS
    # Two lanes, what they go on with, and spare pages.
    assert max(held) < min(keep_mb * 2**20, GROUPS * group) + 5 * group + SPARE * group / 4


def test_rows_of_a_damaged_group_are_bad_samples_and_the_others_come(tables: Path, tmp_path: Path) -> None:
    (path := tmp_path / "0.parquet").write_bytes((tables / "0.parquet").read_bytes())
    damage(path, 1, 1, bytes(12))
    found = list(batches(opened(path), (ROWS, 4), workers=2, epochs=1, skip_bad=True))
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

    def wait(first: int, count: int) -> None:
        if (first, count) in blocks[stalled] and not goes_on.wait(120):
            waited_in_vain.set()

    watched(source, monkeypatch, wait)
    stream = batches(source, (40, 1), accumulation=accumulation, workers=4, epochs=1)
    came = list(islice(stream, stalled // accumulation * accumulation))
    withheld = waited_in_vain.is_set()
    goes_on.set()
    came += stream
    assert not withheld, "a batch was withheld until the block had come"
    expected = batches(opened(shards), (40, 1), accumulation=accumulation, epochs=1)
    assert [batch.keys for batch in came] == [batch.keys for batch in expected]
