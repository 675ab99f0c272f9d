"""The index on disk gives the samples of the shards, reads only new ones, and finds damage."""

import errno
import json
import logging
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.loading import keys_of, open_indexed, pair, refusal, unindexed, write_tar
from tests.support.range_server import serving
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Data
from trainer.data.check import check_data
from trainer.data.distributed_index import data_rows, open_together
from trainer.data.files import Files
from trainer.data.sample import Source
from trainer.data.source import open_source
from trainer.errors import InputError, StorageError

FOLDER = ".clipship-index"


def write_shard(path: Path, keys: list[str]) -> str:
    members = [
        (f"{key}.{ending}", content.encode())
        for key in keys
        for ending, content in (("jpg", f"image of {key}" * 50), ("json", "{}"), ("txt", f"caption of {key}"))
    ]
    return str(write_tar(path, members))


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return [write_shard(tmp_path / f"{n}.tar", [f"{n}/k{k}" for k in range(n + 2)]) for n in range(3)]


def content(source: Source) -> list[tuple[str, object, tuple[str, ...]]]:
    return [(raw.key, raw.image, raw.captions) for raw in map(source.read, range(len(source)))]


def read_whole(paths: Sequence[str]) -> list[tuple[str, object, tuple[str, ...]]]:
    return content(open_source(Data(train=tuple(paths))))


def rows_of(folder: Path, shard: int) -> Path:
    (found,) = folder.glob(f"{shard}-*.rows")
    return found


def catalogue_of(folder: Path) -> Path:
    (found,) = folder.glob("catalogue-*.json")
    return found


def test_a_damaged_catalogue_is_made_again_and_damaged_rows_are_refused(
    shards: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "index"
    open_indexed(shards, folder)
    rows = rows_of(folder, 0)
    for damaged in (rows.read_bytes()[:-1] + b"?", b""):
        rows.write_bytes(damaged)
        with pytest.raises(InputError, match="is damaged"):
            open_indexed(shards, folder).read(0)
    catalogue = catalogue_of(folder)
    catalogue.write_bytes(catalogue.read_bytes()[:-10])
    assert unindexed(shards[:1], folder) == shards[:1]
    assert len(open_indexed(shards, folder)) == 9


@pytest.mark.parametrize(
    "forged",
    [
        *("[]", "{}", '{"shards": []}', '{"shards": {"a.tar": 1}}', '{"shards": {"a.tar": {"new": 1}}}'),
        *({"samples": value} for value in ("3", -1, 2**60)),
        *({"size": None}, {"flaws": 1}, {"flaws": [1]}, {"flaws": [["a", "b", "c"]]}, {"left_out": []}),
        *({"left_out": {"x": "y"}}, {"endings": {"png": -1}}, {"groups": "abc"}),
    ],
)
def test_a_catalogue_that_is_sealed_and_malformed_is_named_and_made_again(
    shards: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, forged: str | dict[str, object]
) -> None:
    """A table stands for values of another kind in the entry of a shard."""
    open_indexed(shards[:1], tmp_path)
    catalogue = catalogue_of(tmp_path)
    if isinstance(forged, dict):
        table = json.loads(catalogue.read_bytes().partition(b"\n")[2])
        next(iter(table["shards"].values())).update(forged)
        forged = json.dumps(table)
    seal = blake2b(forged.encode(), digest_size=16).hexdigest()
    catalogue.write_text(f"{seal}\n{forged}")
    with caplog.at_level(logging.WARNING):
        assert len(open_indexed(shards, tmp_path)) == 9
    assert str(catalogue) in caplog.text
    assert unindexed(shards, tmp_path) == []


def test_an_indexing_that_was_killed_goes_on_where_it_was(shards: list[str], tmp_path: Path) -> None:
    """It has left rows, and no catalogue."""
    folder = tmp_path / "index"
    open_indexed(shards, folder)
    catalogue = catalogue_of(folder)
    catalogue.unlink()
    assert check_data(Data(train=tuple(shards), index=str(folder))) is None
    assert not catalogue.exists(), "a check writes nothing"
    rows_of(folder, 1).unlink()
    assert unindexed(shards, folder) == [shards[1]]
    for shard, place in ((1, 60), (2, 3)):
        catalogue.unlink()
        open_indexed(shards, folder)
        catalogue.unlink()
        damaged = bytearray(rows_of(folder, shard).read_bytes())
        damaged[place] ^= 1
        rows_of(folder, shard).write_bytes(damaged)
        assert unindexed(shards, folder) == [shards[shard]], "they are damaged"
    catalogue.unlink()
    write_shard(Path(shards[0]), ["other"])
    assert unindexed(shards, folder) == [shards[0], shards[2]], "the first has changed since"
    assert content(open_indexed(shards, folder)) == read_whole(shards)


def test_the_command_reads_shards_once_and_prints_the_folder(shards: list[str], tmp_path: Path) -> None:
    for read in ("3 of 3", "0 of 3"):
        said = clipship("index", *shards, "--processes", 2, code=0)
        assert said.out == f"{tmp_path / FOLDER}\n"
        assert f"{read} shards read; 9 samples" in said.err


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_unreachable_server_is_no_bad_input_but_a_missing_shard_is(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, handler):
        with pytest.raises(InputError, match=rf"{address}/none\.tar: cannot be read") as absent:
            unindexed([f"{address}/none.tar"], tmp_path)
        assert not isinstance(absent.value, StorageError)
        handler.failures = 10**9
        for url in (f"{address}/0.tar", "http://127.0.0.1:9/0.tar"):
            with pytest.raises(StorageError, match=rf"{url}: cannot be read"):
                unindexed([url], tmp_path)


def test_a_file_system_that_reports_errors_is_opened_anew(
    shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([OSError(116, "Stale file handle"), OSError(5, "Input/output error")])
    whole = os.pread

    def pread(file: int, size: int, offset: int) -> bytes:
        if error := next(failures, None):
            raise error
        return whole(file, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert Files().read(shards[0], 0, 5) == Path(shards[0]).read_bytes()[:5]


def test_jobs_that_write_a_catalogue_at_once_lose_nothing(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from trainer.data.index import Entry, Selection, write_catalogue
for number in range(20):
    entries = {f"{sys.argv[2]}-{number}.tar": Entry(1, "", 1, "", {}, {})}
    write_catalogue(Path(sys.argv[1]), Selection(("jpg",), "txt"), entries)
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    written = json.loads(catalogue_of(tmp_path).read_bytes().partition(b"\n")[2])["shards"]
    assert set(written) == {f"{name}-{number}.tar" for name in "ab" for number in range(20)}


def test_a_catalogue_that_cannot_be_locked_is_written_all_the_same(shards: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "index"
    open_indexed(shards[:1], folder)
    lock = folder / f".{catalogue_of(folder).name}.lock"
    lock.unlink()
    lock.mkdir()
    open_indexed(shards, folder)
    assert unindexed(shards, folder) == []


def test_an_index_where_nothing_can_be_made_is_refused(shards: list[str], tmp_path: Path) -> None:
    said = "0.tar/index: the index cannot be written: Not a directory; choose another folder with --to"
    assert said in refusal(open_indexed, shards, tmp_path / "0.tar" / "index")


@pytest.mark.parametrize("kind", ["webdataset", "table"])
def test_ranks_that_see_different_files_are_refused(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each would make an order of its own: samples would be lost and come twice in silence."""
    job = tiny_job(data={"train": (f"{tmp_path}/*.tar",), "format": kind, "index": str(tmp_path / "index")})

    def seen(patterns: Sequence[str]) -> list[str]:
        return shards[:-1] if threading.current_thread().name == "late" else shards

    def opened(comm: Comm) -> str:
        if comm.world.rank == 1:
            threading.current_thread().name = "late"
        with pytest.raises(StorageError) as caught:
            open_together(job, comm)
        return str(caught.value)

    monkeypatch.setattr("trainer.data.distributed_index.expand_shards", seen)
    text = "data.train: rank 0 finds 3 files, and rank 1 2 or others: nodes may see new files late"
    assert [each[: len(text)] for each in run_ranks(2, opened)] == [text] * 2


def test_ranks_share_the_requests_for_versions_and_index_in_rounds(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone would ask for 100,000 shards for minutes, and who is done would wait for the others."""
    from trainer.data import distributed_index

    store = fsspec.filesystem("memory")
    for path in shards:
        store.pipe(f"/rounds/{Path(path).name}", Path(path).read_bytes())
    far = [f"memory://rounds/{Path(path).name}" for path in shards]
    asked: dict[str, list[list[str]]] = {"versions_of": [], "index_shards": []}
    for name, calls in asked.items():
        original = getattr(distributed_index, name)

        def counted(paths: Any, *others: Any, original: Any = original, calls: Any = calls) -> Any:
            calls.append(list(paths))
            return original(paths, *others)

        monkeypatch.setattr(distributed_index, name, counted)
    monkeypatch.setattr(distributed_index, "ROUND", 1)
    job = tiny_job(data={"train": tuple(far), "format": "webdataset", "index": str(tmp_path / "index")})
    for times in (1, 2):
        sources = run_ranks(2, lambda comm: open_together(job, comm))
        assert [source.shard_sizes() for source in sources] == [[2, 3, 4]] * 2
        assert sorted(asked["versions_of"]) == sorted([far[::2], far[1::2], []] * times)
        assert sorted(asked["index_shards"]) == [[], *([path] for path in far)], "none is read again"
    store.rm("/rounds", recursive=True)
    said = refusal(run_ranks, 2, lambda comm: open_together(job, comm))
    assert len(said.splitlines()) == 3, "each file once"


def test_data_are_known_by_sizes_and_samples_not_by_names_and_times(
    shards: list[str], tmp_path: Path
) -> None:
    """A copy on a node's own disk is the same data."""
    data = Data(train=tuple(shards))
    before = data_rows(data, open_indexed(shards, tmp_path / "index"))
    copies = [str(shutil.copy(path, tmp_path / f"copy-{Path(path).name}")) for path in shards]
    assert data_rows(data, open_indexed(copies, tmp_path / "of copies")) == before
    write_shard(Path(copies[0]), ["only"])
    assert data_rows(data, open_indexed(copies, tmp_path / "of copies")) != before


def test_data_without_an_index_are_known_by_their_files_too(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("image,caption\na.png,one\n")
    data = Data(train=(str(table),), caption_column=("caption",))
    before = data_rows(data, open_source(data))
    table.write_text("image,caption\na.png,another one\n")
    assert data_rows(data, open_source(data)) != before
    made_up = Data(format="synthetic")
    assert data_rows(made_up, open_source(made_up)) == []


def test_an_interrupt_waits_only_for_shards_that_are_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def scan(path: str, *_of: object) -> None:
        begun.append(path)
        time.sleep(0.05)
        raise InputError(path)

    def interrupt(_done: int, _of: int) -> None:
        raise KeyboardInterrupt

    for number in range(300):
        (tmp_path / f"{number}.tar").touch()
    monkeypatch.setattr("trainer.data.indexed.scan", scan)
    with pytest.raises(KeyboardInterrupt):
        open_source(Data(train=(f"{tmp_path}/*.tar",)), interrupt)
    assert len(begun) < 150


def test_an_index_is_read_where_nothing_shared_can_be_mapped(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []

    class PrivateAlone(mmap.mmap):
        refused = mmap.MAP_SHARED

        def __new__(cls, file: int, size: int, flags: int = mmap.MAP_SHARED, **more: Any) -> "PrivateAlone":
            if flags & cls.refused:
                raise OSError(errno.ENODEV, "No such device")
            return super().__new__(cls, file, size, flags=flags, **more)

    source, other = (open_indexed(shards, tmp_path / "index") for _ in range(2))
    monkeypatch.setattr("trainer.run.retry.time.sleep", waits_s.append)
    monkeypatch.setattr(mmap, "mmap", PrivateAlone)
    assert source.read(0).key
    monkeypatch.setattr(PrivateAlone, "refused", mmap.MAP_SHARED | mmap.MAP_PRIVATE)
    with pytest.raises(StorageError, match=r"cannot be read: No such device"):
        other.read(0)
    assert not waits_s, "it would not pass"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_index_of_signed_shards_holds_no_signature(tmp_path: Path) -> None:
    path = "memory://shards/0.tar?sig=s3cr3t"
    shard = write_tar(tmp_path / "0.tar", pair("a"))
    fsspec.filesystem("memory").pipe("/shards/0.tar?sig=s3cr3t", shard.read_bytes())
    assert keys_of(open_indexed([path], tmp_path / "index")) == ["a"]
    assert "sig=***" in catalogue_of(tmp_path / "index").read_text()
    for found in (tmp_path / "index").iterdir():
        assert "s3cr3t" not in found.name
        assert b"s3cr3t" not in found.read_bytes()
