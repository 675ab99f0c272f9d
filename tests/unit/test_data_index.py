"""The index on disk gives the same samples as reading the shards.

Only new shards are read, damage is found, and URLs are read by range.
"""

import errno
import io
import json
import logging
import mmap
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.jobs import tiny_job
from tests.support.range_server import Ranges, serving
from tests.support.thread_ranks import run_ranks
from trainer.cli.index import command
from trainer.comm.protocol import Comm
from trainer.config import Data
from trainer.data import distributed_index, files, index, indexed
from trainer.data.entry import Entry
from trainer.data.files import Files, Stamp
from trainer.data.identity import data_rows
from trainer.data.index import (
    catalogue_file,
    index_folder,
    index_shards,
    open_index,
    read_catalogue,
    rows_file,
    stale,
    write_catalogue,
)
from trainer.data.indexed import index_in_memory
from trainer.data.shards import ShardSource, open_indexed, open_shards
from trainer.data.source import IMAGE_ENDINGS, open_source
from trainer.data.tar import Selection
from trainer.errors import InputError, StorageError

SELECTION = Selection(IMAGE_ENDINGS, "txt")


def write_shard(path: Path, keys: list[str]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for key in keys:
            members = {"jpg": f"image of {key}" * 50, "json": "{}", "txt": f"caption of {key}"}
            for ending, content in members.items():
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(content.encode())
                tar.addfile(info, io.BytesIO(content.encode()))
    return path


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return [str(write_shard(tmp_path / f"{n}.tar", [f"{n}/k{k}" for k in range(n + 2)])) for n in range(3)]


def made(paths: list[str], folder: Path) -> ShardSource:
    """Through an index that is brought up to date first."""
    missing = stale(paths, SELECTION, folder)
    write_catalogue(folder, SELECTION, index_shards(missing, SELECTION, folder))
    return open_indexed(open_index(paths, SELECTION, folder), SELECTION, "captions")


def content(source: ShardSource) -> list[tuple[str, object, tuple[str, ...]]]:
    return [(raw.key, raw.image, raw.captions) for raw in map(source.read, range(len(source)))]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.lists(
            st.text("abcö/ 猫", min_size=1, max_size=9).filter(
                lambda key: key.strip("/") == key and "//" not in key
            ),
            unique=True,
            max_size=5,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_an_index_gives_the_samples_that_reading_the_shards_gives(
    tmp_path_factory: pytest.TempPathFactory, keys: list[list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("set")
    paths = [str(write_shard(folder / f"{number}.tar", of_shard)) for number, of_shard in enumerate(keys)]
    if not any(keys):
        return
    source = made(paths, folder / "index")
    assert content(source) == content(open_shards(paths, IMAGE_ENDINGS, "txt", "captions"))
    assert content(pickle.loads(pickle.dumps(source))) == content(source)


def test_only_new_and_changed_shards_are_read_again(shards: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "index"
    made(shards, folder)
    assert list(stale(shards, SELECTION, folder)) == []
    write_shard(Path(shards[1]), ["other"])
    os.utime(shards[1], (time.time() + 9,) * 2)  # of the same size, and perhaps within one tick of the clock
    more = str(write_shard(tmp_path / "more.tar", ["m"]))
    assert list(stale([*shards, more], SELECTION, folder)) == [shards[1], more]
    source = made([*shards, more], folder)
    assert source.shard_sizes() == [2, 1, 4, 1]
    assert source.read(2).key == "other"


def test_a_shard_with_the_longest_name_has_an_index(tmp_path: Path) -> None:
    names = ["s" * 250 + "1", "s" * 250 + "2", "\N{GRINNING FACE}" * 62 + "123"]
    paths = [str(write_shard(tmp_path / f"{name}.tar", [name[-1]])) for name in names]
    assert [len(os.fsencode(Path(path).name)) for path in paths] == [255] * 3
    made(paths, tmp_path / "index")
    assert stale(paths, SELECTION, tmp_path / "index") == {}
    assert len({rows_file(tmp_path, path, SELECTION) for path in paths}) == 3


def test_a_job_with_other_endings_has_an_index_of_its_own(shards: list[str], tmp_path: Path) -> None:
    made(shards, tmp_path)
    assert list(stale(shards, Selection(("jpg",), "json"), tmp_path)) == shards


def test_shards_and_index_may_move_together(shards: list[str], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    moved = [os.path.join(tmp_path, "b", Path(path).name) for path in shards]
    for path in shards:
        Path(path).rename(tmp_path / "a" / Path(path).name)
    made([path.replace("/b/", "/a/") for path in moved], tmp_path / "a" / index.FOLDER)
    (tmp_path / "a").rename(tmp_path / "b")
    assert list(stale(moved, SELECTION, tmp_path / "b" / index.FOLDER)) == []


def test_a_damaged_catalogue_is_made_again_and_damaged_rows_are_refused(
    shards: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "index"
    made(shards, folder)
    rows = rows_file(folder, shards[0], SELECTION)
    rows.write_bytes(rows.read_bytes()[:-1] + b"?")
    for damaged in (rows.read_bytes(), b""):
        rows.write_bytes(damaged)
        with pytest.raises(InputError, match="is damaged"):
            open_indexed(open_index(shards, SELECTION, folder), SELECTION, "captions").read(0)
    catalogue = catalogue_file(folder, SELECTION)
    catalogue.write_bytes(catalogue.read_bytes()[:-10])
    assert read_catalogue(folder, SELECTION) == {}
    assert len(made(shards, folder)) == 9


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"shards": []}',
        '{"shards": {"a.tar": 1}}',
        '{"shards": {"a.tar": {}}}',
        '{"shards": {"a.tar": {"new": 1}}}',
        {"samples": "3"},
        {"size": None},
        {"flaws": 1},
        {"left_out": []},
    ],
)
def test_a_catalogue_that_is_sealed_and_malformed_is_named_and_made_again(
    shards: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | dict[str, object]
) -> None:
    """A table stands for values of another kind in the entry of a shard."""
    made(shards, tmp_path)
    catalogue = catalogue_file(tmp_path, SELECTION)
    if isinstance(content, dict):
        table = json.loads(catalogue.read_bytes().partition(b"\n")[2])
        next(iter(table["shards"].values())).update(content)
        content = json.dumps(table)
    catalogue.write_bytes(index._digest(content.encode()).encode() + b"\n" + content.encode())
    with caplog.at_level(logging.WARNING):
        assert read_catalogue(tmp_path, SELECTION) == {}
    assert str(catalogue) in caplog.text
    assert len(made(shards, tmp_path)) == 9


def test_bad_shards_are_named_and_the_good_ones_need_not_be_read_again(
    shards: list[str], tmp_path: Path
) -> None:
    Path(shards[1]).write_bytes(b"")
    with pytest.raises(InputError, match=r"1\.tar: not a readable tar file: the file is empty"):
        made(shards, tmp_path / "index")
    assert list(stale(shards, SELECTION, tmp_path / "index")) == [shards[1]]


KILLED = """
import os, sys
from pathlib import Path
from trainer.data import index
from trainer.data.source import IMAGE_ENDINGS
from trainer.data.tar import Selection
scan = index.scan
index.scan = lambda path, *others: os._exit(9) if path == sys.argv[3] else scan(path, *others)
index.THREADS = 1
selection, folder = Selection(IMAGE_ENDINGS, "txt"), Path(sys.argv[1])
index.index_shards(index.stale(sys.argv[2:], selection, folder), selection, folder)
"""


def test_an_indexing_that_was_killed_goes_on_where_it_was(shards: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "index"
    command = [sys.executable, "-c", KILLED, str(folder), shards[0], shards[2], shards[1]]
    assert subprocess.run(command).returncode == 9
    assert not catalogue_file(folder, SELECTION).exists()
    assert list(stale(shards, SELECTION, folder, adopt=False)) == shards, "a check writes nothing"
    assert not catalogue_file(folder, SELECTION).exists()
    assert list(stale(shards, SELECTION, folder)) == shards[1:]
    write_shard(Path(shards[0]), ["other"])
    assert list(stale(shards, SELECTION, folder)) == shards, "it has changed since"
    source = made(shards, folder)
    assert content(source) == content(open_shards(shards, IMAGE_ENDINGS, "txt", "captions"))


def test_what_a_killed_indexing_left_is_read_again_if_it_is_damaged(
    shards: list[str], tmp_path: Path
) -> None:
    index_shards(stale(shards, SELECTION, tmp_path), SELECTION, tmp_path)
    for path, place in ((shards[0], 60), (shards[1], 3)):
        rows = rows_file(tmp_path, path, SELECTION)
        damaged = bytearray(rows.read_bytes())
        damaged[place] ^= 1
        rows.write_bytes(damaged)
    assert list(stale(shards, SELECTION, tmp_path)) == shards[:2]


def test_the_index_is_kept_beside_the_shards_where_one_may_write(shards: list[str], tmp_path: Path) -> None:
    assert index_folder(shards) == tmp_path / index.FOLDER
    assert index_folder(["s3://bucket/0.tar"]) is None


def test_the_command_reads_shards_once_and_prints_the_folder(shards: list[str], tmp_path: Path) -> None:
    for read in ("3 of 3", "0 of 3"):
        result = CliRunner().invoke(command, [*shards, "--processes", "2"], catch_exceptions=False)
        assert (result.exit_code, result.stdout) == (0, f"{tmp_path / index.FOLDER}\n")
        assert f"{read} shards read; 9 samples" in result.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, type[Ranges]]]:
    with serving(tmp_path) as found:
        yield found


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec's client lives as long as the process
def test_shards_behind_a_url_are_indexed_and_read_by_range(
    shards: list[str], tmp_path: Path, server: tuple[str, type[Ranges]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, handler = server
    urls = [f"{address}/{Path(path).name}" for path in shards]
    heads: list[str] = []

    def head(self: Ranges) -> None:
        heads.append(self.path)
        self._answer(body=False)

    monkeypatch.setattr(handler, "do_HEAD", head)
    source = made(urls, tmp_path / "index")
    assert sorted(heads) == ["/0.tar", "/1.tar", "/2.tar"], "each is asked for its size once"
    assert content(source) == content(open_shards(shards, IMAGE_ENDINGS, "txt", "captions"))
    assert list(stale(urls, SELECTION, tmp_path / "index")) == []
    before, handler.sent = len(handler.asked), 0
    image = source.read(0).image
    assert len(handler.asked) == before + 1
    assert len(image) < handler.sent < 10_000 < Path(shards[0]).stat().st_size * 2


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_storage_that_fails_for_a_while_is_asked_again_and_then_named(
    shards: list[str], tmp_path: Path, server: tuple[str, type[Ranges]]
) -> None:
    address, handler = server
    source = made([f"{address}/0.tar"], tmp_path / "index")
    handler.failures = 2
    assert source.read(0).key == "0/k0"
    handler.failures = 3
    with pytest.raises(StorageError, match=rf"{address}/0\.tar: cannot be read after 3 attempts .*503"):
        source.read(0)


def test_an_unreachable_server_is_no_bad_input_but_a_missing_shard_is(
    server: tuple[str, type[Ranges]],
) -> None:
    address, handler = server
    with pytest.raises(InputError, match=rf"{address}/none\.tar: cannot be read") as absent:
        stale([f"{address}/none.tar"], SELECTION, Path("index"))
    assert not isinstance(absent.value, StorageError)
    handler.failures = 10**9
    with pytest.raises(StorageError, match=rf"{address}/0\.tar: cannot be read"):
        stale([f"{address}/0.tar"], SELECTION, Path("index"))
    with pytest.raises(StorageError, match="cannot be read"):
        stale(["http://127.0.0.1:9/0.tar"], SELECTION, Path("index"))


def test_the_index_is_waited_for_as_the_shards_are(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"
    source = made(shards, folder)
    rows = rows_file(folder, shards[0], SELECTION)
    away = tmp_path / "away"
    rows.rename(away)
    with pytest.raises(StorageError, match=rf"{rows}: cannot be read after 3 attempts"):
        source.read(0)
    monkeypatch.setattr("trainer.run.retry.time.sleep", lambda seconds: away.exists() and away.rename(rows))
    assert source.read(0).key == "0/k0"


def test_a_shard_that_comes_back_is_read(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_shards(shards, IMAGE_ENDINGS, "txt", "captions")
    away = tmp_path / "away"
    Path(shards[0]).rename(away)
    monkeypatch.setattr(
        "trainer.run.retry.time.sleep", lambda seconds: away.exists() and away.rename(shards[0])
    )
    assert source.read(0).key == "0/k0"


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


ADD_ENTRIES = """
import sys
from pathlib import Path
from trainer.data.entry import Entry
from trainer.data.index import write_catalogue
from trainer.data.source import IMAGE_ENDINGS
from trainer.data.tar import Selection
for number in range(20):
    entries = {f"{sys.argv[2]}-{number}.tar": Entry(1, "", 1, "", {}, {})}
    write_catalogue(Path(sys.argv[1]), Selection(IMAGE_ENDINGS, "txt"), entries)
"""


def test_jobs_that_write_a_catalogue_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", ADD_ENTRIES, str(tmp_path), name]) for name in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert set(read_catalogue(tmp_path, SELECTION)) == {
        f"{name}-{number}.tar" for name in "abc" for number in range(20)
    }


def test_a_catalogue_that_cannot_be_locked_is_written_all_the_same(tmp_path: Path) -> None:
    catalogue = catalogue_file(tmp_path, SELECTION)
    catalogue.with_name(f".{catalogue.name}.lock").mkdir()
    write_catalogue(tmp_path, SELECTION, {"a.tar": Entry(1, "", 1, "", {}, {})})
    assert set(read_catalogue(tmp_path, SELECTION)) == {"a.tar"}


def test_an_index_where_nothing_can_be_made_is_refused(shards: list[str], tmp_path: Path) -> None:
    said = r"0\.tar/index: the index cannot be written: Not a directory; choose another folder with --to"
    with pytest.raises(InputError, match=said):
        made(shards, tmp_path / "0.tar" / "index")


def test_a_job_opens_what_it_has_indexed_whatever_others_make_of_the_catalogue(
    shards: list[str], tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the file system has no locks, and another job replaces the catalogue by its own."""

    def overwritten(folder: Path, selection: Selection, entries: Mapping[str, Entry]) -> None:
        write_catalogue(folder, selection, entries)
        catalogue_file(folder, selection).unlink()

    monkeypatch.setattr(distributed_index, "write_catalogue", overwritten)
    job = tiny_job(data={"train": tuple(shards), "format": "webdataset", "index": str(tmp_path / "index")})
    assert len(distributed_index.open_together(job, alone)) == 9


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
            distributed_index.open_together(job, comm)
        return str(caught.value)

    monkeypatch.setattr(distributed_index, "expand_shards", seen)
    text = "data.train: rank 0 finds 3 files, and rank 1 2 or others: nodes may see new files late"
    assert [each[: len(text)] for each in run_ranks(2, opened)] == [text] * 2


def test_ranks_share_the_requests_for_versions_and_index_in_rounds(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone would ask for 100,000 shards for minutes, and who is done would wait for the others."""
    store = fsspec.filesystem("memory")
    for path in shards:
        store.pipe(f"/rounds/{Path(path).name}", Path(path).read_bytes())
    far = [f"memory://rounds/{Path(path).name}" for path in shards]
    asked: list[list[str]] = []
    indexed: list[list[str]] = []

    def versions_of(paths: Sequence[str]) -> dict[str, Stamp]:
        asked.append(list(paths))
        return index.versions_of(paths)

    def index_shards(versions: Mapping[str, Stamp], *others: Any) -> dict[str, Entry]:
        indexed.append(list(versions))
        return index.index_shards(versions, *others)

    monkeypatch.setattr(distributed_index, "versions_of", versions_of)
    monkeypatch.setattr(distributed_index, "index_shards", index_shards)
    monkeypatch.setattr(distributed_index, "ROUND", 1)
    job = tiny_job(data={"train": tuple(far), "format": "webdataset", "index": str(tmp_path / "index")})
    for times in (1, 2):
        sources = run_ranks(2, lambda comm: distributed_index.open_together(job, comm))
        assert [source.shard_sizes() for source in sources] == [[2, 3, 4]] * 2
        assert sorted(asked) == sorted([far[::2], far[1::2], []] * times)
        assert sorted(indexed) == [[], *([path] for path in far)], "what is there is not read again"
    store.rm("/rounds", recursive=True)
    with pytest.raises(InputError) as caught:
        run_ranks(2, lambda comm: distributed_index.open_together(job, comm))
    assert len(str(caught.value).splitlines()) == 3, "each file once"


def test_a_file_that_one_rank_lacks_ends_all_ranks_alike(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(data={"train": (f"{tmp_path}/none*.tar",), "format": "webdataset"})

    def opened(comm: Comm) -> str:
        with pytest.raises(InputError) as caught:
            distributed_index.open_together(job, comm)
        return str(caught.value)

    texts = run_ranks(2, opened)
    assert texts[0] == texts[1]
    assert "no file matches" in texts[0]


def test_many_shards_that_are_not_there_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(files, "WAITS_S", (1.0, 2.0))
    monkeypatch.setattr(time, "sleep", waits.append)
    missing = [str(tmp_path / f"{number:05d}.tar") for number in range(100)]
    said = r"00000\.tar: cannot be read after 3 attempts in 3 s: No such file(.|\n)*and 95 more shards"
    with pytest.raises(InputError, match=said):
        stale(missing, SELECTION, tmp_path)
    assert waits == [1.0, 2.0]


def test_data_are_known_by_sizes_and_samples_not_by_names_and_times(
    shards: list[str], tmp_path: Path
) -> None:
    """A copy on a node's own disk is the same data."""
    data = Data(train=tuple(shards))
    before = data_rows(data, made(shards, tmp_path / "index"))
    copies = [str(shutil.copy(path, tmp_path / f"copy-{Path(path).name}")) for path in shards]
    assert data_rows(data, made(copies, tmp_path / "of copies")) == before
    write_shard(Path(copies[0]), ["only"])
    assert data_rows(data, made(copies, tmp_path / "of copies")) != before


def test_data_without_an_index_are_known_by_their_files_too(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("image,caption\na.png,one\n")
    data = Data(train=(str(table),), caption_column=("caption",))
    before = data_rows(data, open_source(data))
    table.write_text("image,caption\na.png,another one\n")
    assert data_rows(data, open_source(data)) != before
    made_up = Data(format="synthetic")
    assert data_rows(made_up, open_source(made_up)) == []


def index_on_disk(paths: Sequence[str], folder: Path, progress: Callable[[int, int], None]) -> None:
    index_shards(dict.fromkeys(paths, Stamp(1, "")), SELECTION, folder, progress)


def index_at_once(paths: Sequence[str], _folder: Path, progress: Callable[[int, int], None]) -> None:
    index_in_memory(paths, SELECTION, progress)


@pytest.mark.parametrize(("module", "make"), [(index, index_on_disk), (indexed, index_at_once)])
def test_an_interrupt_waits_only_for_shards_that_are_being_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    make: Callable[[Sequence[str], Path, Callable[[int, int], None]], None],
) -> None:
    begun: list[str] = []

    def scan(path: str, *_of: object) -> None:
        begun.append(path)
        time.sleep(0.05)
        raise InputError(path)

    def interrupt(_done: int, _of: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "scan", scan)
    with pytest.raises(KeyboardInterrupt):
        make([f"{number}.tar" for number in range(300)], tmp_path, interrupt)
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

    monkeypatch.setattr("trainer.run.retry.time.sleep", waits_s.append)
    monkeypatch.setattr(mmap, "mmap", PrivateAlone)
    assert made(shards, tmp_path).read(0).key
    monkeypatch.setattr(PrivateAlone, "refused", mmap.MAP_SHARED | mmap.MAP_PRIVATE)
    with pytest.raises(StorageError, match=r"cannot be read: No such device"):
        made(shards, tmp_path).read(0)
    assert not waits_s, "it would not pass"
