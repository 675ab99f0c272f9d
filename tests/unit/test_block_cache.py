"""Parts of shards on a node's disk: read once, checked, bounded, and nothing breaks when the disk does."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.config import Data
from trainer.data.block_cache import BlockCache, cache_of

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
