"""Blocks are read ahead, each once a rank, and the batches are those that samples read alone would give."""

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from tests.support.loading import pair, plan_of, rank_batches, write_tar
from tests.support.pictures import picture
from tests.support.range_server import serving
from tests.support.tables import damage
from trainer.config import Data, Eval
from trainer.data.arena import Arena
from trainer.data.block_cache import BlockCache, cache_of
from trainer.data.eval_blocks import eval_blocks
from trainer.data.files import Files
from trainer.data.lanes import Lanes
from trainer.data.loader import Batch
from trainer.data.pack import write_shard
from trainer.data.processes import start_process_server
from trainer.data.sample import Source
from trainer.data.sample_requests import TrainRequests
from trainer.data.source import open_labelled, open_source
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


# An evaluation reads far data a block at a time, each once, and finds what samples read alone would give.

SIZES = (7, 30, 1, 22)
"""Samples of each shard, of which blocks of 16 begin and end anywhere."""


def tensor_of(image: Image.Image) -> Tensor:
    pixels: Tensor = pil_to_tensor(image).float()
    return pixels


@pytest.fixture(scope="module")
def eval_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    start_process_server()
    folder = tmp_path_factory.mktemp("labelled")
    numbers = iter(range(sum(SIZES)))
    for shard, size in enumerate(SIZES):
        samples = (
            (f"{number:03d}", {"png": picture(number, 2), "cls": str(number % 5).encode()})
            for number in islice(numbers, size)
        )
        write_shard(samples, folder / f"{shard}.tar")
    return folder


def labelled(folder: object) -> Source:
    return open_labelled(Eval(zero_shot=(f"{folder}/{{0..3}}.tar",), class_names=tuple("abcde")))


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (4, 0)])
def test_a_block_of_far_shards_is_one_request_for_each_shard_that_it_lies_in(
    eval_shards: Path, world_size: int, workers: int
) -> None:
    source = labelled(eval_shards)
    alone = [source.read(number) for number in range(sum(SIZES))]
    with serving(eval_shards) as (url, server):
        far = labelled(url)
        server.asked.clear()
        how: dict[str, Any] = {"transform": tensor_of, "workers": workers, "world_size": world_size}
        ranks = range(world_size)
        found = [block for rank in ranks for block in eval_blocks(far, rank=rank, block=16, **how)]
        asked = list(server.asked)
    found.sort(key=lambda block: block.numbers)
    assert [number for block in found for number in block.numbers] == list(range(sum(SIZES)))
    labels = torch.cat([block.labels[: block.valid] for block in found])
    assert labels.tolist() == [raw.label for raw in alone]
    images = torch.cat([block.images[: block.valid] for block in found])
    assert images[:, 0, 0, 0].tolist() == list(range(sum(SIZES)))
    assert len(asked) == len(set(asked)) == 7, "four blocks, cut by three ends of shards"


# Parts of shards on a node's disk: read once, checked, bounded, and nothing breaks when the disk does.

PART_BYTES = 2**22
SIZE = PART_BYTES + 5000
CONTENT = bytes(range(251)) * (SIZE // 251 + 1)
VERSION = (SIZE, "1")
ALL = 10**12


class Store:
    """Counts what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int]] = []

    def __call__(self, begin: int, end: int) -> bytes:
        self.fetched.append((begin, end))
        return CONTENT[begin:end]


def read(cache: BlockCache, store: Store, begin: int, end: int, path: str = "s3://b/0.tar") -> None:
    assert cache.read(path, VERSION, begin, end, store) == CONTENT[begin:end]


def test_a_part_is_fetched_once_whatever_is_read_of_it_and_after_a_restart(tmp_path: Path) -> None:
    store = Store()
    for cache in (BlockCache(tmp_path, ALL), BlockCache(tmp_path, ALL)):
        for begin, end in ((5, 500), (0, PART_BYTES), (PART_BYTES - 3, PART_BYTES + 9), (100, SIZE)):
            read(cache, store, begin, end)
    assert store.fetched == [(0, PART_BYTES), (PART_BYTES, SIZE)]
    read(cache, store, 0, 9, "s3://b/1.tar")
    cache.read("s3://b/0.tar", (SIZE, "2"), 0, 9, store)
    assert len(store.fetched) == 4, "another shard and another version"


def test_a_shard_whose_version_nobody_knows_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = BlockCache(tmp_path, ALL)
    for content in (b"one", b"two"):
        assert cache.read("http://h/0.tar", (3, ""), 0, 3, lambda *_, found=content: found) == content
    assert len(caplog.records) == 1
    assert "http://h/0.tar" in caplog.text
    assert list(tmp_path.iterdir()) == []


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[99] ^= 1
    file.write_bytes(content)


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink, replace_by_folder])
def test_a_damaged_part_is_fetched_again(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    store, cache = Store(), BlockCache(tmp_path, ALL)
    read(cache, store, 0, 9)
    (file,) = tmp_path.rglob("*.part")
    harm(file)
    read(cache, store, 0, 9)
    assert len(store.fetched) == 2


def test_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    store, cache = Store(), BlockCache(tmp_path, 10 * PART_BYTES)
    for number in range(9):
        read(cache, store, 0, 9, f"{number}.tar")
        for file in tmp_path.rglob("*.part"):
            os.utime(file, (file.stat().st_mtime - 60,) * 2)
    read(cache, store, 0, 9, "0.tar")  # used just now
    before = len(store.fetched)
    read(cache, store, 0, 9, "9.tar")
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.part")) <= 0.8 * 10 * PART_BYTES
    read(cache, store, 0, 9, "0.tar")
    assert len(store.fetched) == before + 1
    read(cache, store, 0, 9, "1.tar")
    assert len(store.fetched) == before + 2


def test_a_disk_that_takes_nothing_is_told_once_and_everything_is_still_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    store, cache = Store(), BlockCache(tmp_path / "file" / "cache", ALL)
    read(cache, store, 0, 9)
    read(cache, store, 0, 9)
    assert len(store.fetched) == 2
    (record,) = caplog.records
    assert "nothing more is kept in" in record.getMessage()
    assert "Not a directory" in record.getMessage()
    read(cache, store, 1000, 2000)
    assert store.fetched[-1] == (1000, 2000), "a whole part is fetched to be kept alone"


def test_parts_on_a_read_only_disk_count_and_what_a_killed_rank_left_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    read(BlockCache(tmp_path, ALL), store, 0, 9)
    (file,) = tmp_path.rglob("*.part")
    old, new = (file.with_name(f".0.part.{number}.partial") for number in range(2))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))

    def refused(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.data.block_cache.os.utime", refused)
        read(BlockCache(tmp_path, ALL), store, 0, 9)
    assert len(store.fetched) == 1
    read(BlockCache(tmp_path, ALL), store, PART_BYTES, SIZE)
    assert not old.exists()
    assert new.exists(), "another rank may be writing it"


@pytest.mark.parametrize("trap", ["a link", "open to all"])
def test_a_part_that_another_user_may_have_put_there_is_not_read(
    tmp_path: Path, trap: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, data = Store(), Data(train=("0.tar",), cache=str(tmp_path / "cache"))
    cache = cache_of(data)
    assert cache is not None
    read(cache, store, 0, PART_BYTES)
    (own,) = (tmp_path / "cache").iterdir()
    assert own.stat().st_mode & 0o077 == 0
    (part,) = own.rglob("*.part")
    wrong = bytes(PART_BYTES)
    part.write_bytes(zlib.crc32(wrong).to_bytes(4, "little") + wrong)
    if trap == "a link":
        own.rename(tmp_path / "elsewhere")
        own.symlink_to(tmp_path / "elsewhere")
    else:
        own.chmod(0o777)
    assert cache_of(data) is None
    assert "another user's, or others can enter it" in caplog.text


def test_no_link_among_the_parts_is_followed(tmp_path: Path) -> None:
    store, victim = Store(), tmp_path / "victim"
    read(BlockCache(tmp_path / "cache", ALL), store, 0, 9)
    (part,) = tmp_path.rglob("*.part")
    part.rename(victim)
    part.symlink_to(victim)
    before = victim.stat().st_mtime_ns
    read(BlockCache(tmp_path / "cache", ALL), store, 0, 9)
    assert len(store.fetched) == 2
    assert victim.stat().st_mtime_ns == before


def test_a_relative_path_in_another_folder_is_another_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(tmp_path / "cache", ALL)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert cache.read("0.tar", (3, "1"), 0, 3, lambda *_, name=name: name.encode()) == name.encode()
