"""`clipship check` sees what a run would refuse, and counts samples.

It looks into an index, into what others write beside shards, and into the first samples.
"""

import json
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import webdataset
from pyarrow import parquet

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.loading import open_indexed, pair, write_tar
from tests.support.pictures import picture
from tests.support.range_server import serving
from trainer.config import Data
from trainer.data.check import check_data
from trainer.data.source import open_source
from trainer.data.tar import read_headers
from trainer.errors import InputError
from trainer.plan.first_samples import FirstSamples

DOTS = "a dot in the name, where the key ends: rename a.b.jpg to a-b.jpg"


def shard(path: Path, samples: int, ending: str, hidden: int = 0) -> str:
    """Writes samples, and beside them some that share the key `scan`."""
    keys = [*(f"{number:04d}" for number in range(samples)), *(f"scan.{number}" for number in range(hidden))]
    return str(write_tar(path, [(f"{key}.{of}", b"abc") for key in keys for of in ("png", ending)]))


def test_index_beside_the_shards_counts_their_samples(tmp_path: Path) -> None:
    data = Data(train=(shard(tmp_path / "a.tar", 5, "txt"),))
    assert check_data(data) is None
    clipship("index", data.train[0], code=0)
    assert check_data(data) == 5
    shard(tmp_path / "a.tar", 70, "txt")
    assert check_data(data) is None, "the index is older than the shard"


@pytest.mark.parametrize("indexed", [False, True])
def test_captions_with_another_ending_are_refused(tmp_path: Path, indexed: bool) -> None:
    data = Data(train=(shard(tmp_path / "a.tar", 5, "json"),))
    if indexed:
        clipship("index", data.train[0])
    with pytest.raises(InputError, match=r"Found .*\.json \(5\); a sample needs one of .* and a \.txt"):
        check_data(data)


@pytest.mark.parametrize("indexed", [False, True])
def test_what_a_run_would_refuse_for_its_bad_samples_check_refuses(tmp_path: Path, indexed: bool) -> None:
    data = Data(train=(shard(tmp_path / "a.tar", 20, "txt", hidden=1100),))
    if indexed:
        clipship("index", data.train[0])
    said = r"bad samples: 1100 of 1120 \(1100 a dot in the name, where the key ends"
    for check in (check_data, open_source):
        with pytest.raises(InputError, match=said):
            check(data)
    assert check_data(data, "DATA") == (20 if indexed else None), "which commands that look at data ask"
    assert json.loads(clipship("data", "stats", data.train[0], code=0).out)["not_usable"] == {DOTS: 1100}


def test_a_first_shard_of_several_is_only_an_example(tmp_path: Path) -> None:
    paths = [shard(tmp_path / f"{name}.tar", 20, "txt", hidden=9 * (name == "a")) for name in "ab"]
    data = Data(train=tuple(paths), max_bad_share=0)
    assert check_data(data) is None
    job = tiny_job(data={"format": "auto", "train": tuple(paths)}, optim={"positives": "captions"})
    said = f"{paths[0]}: 9 of its 29 samples are not used: 9 with {DOTS}"
    assert list(FirstSamples(job).warnings()) == [said]


def test_login_node_without_numpy_says_how_to_check_without_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_numpy(*_: object) -> Any:
        raise ModuleNotFoundError(name="numpy")

    (tmp_path / "t.csv").touch()
    monkeypatch.setattr("trainer.data.formats._Tables.check", no_numpy)
    with pytest.raises(
        InputError,
        match=r"^data.train: the Python package numpy .* has --no-data .* `resume` have --no-check",
    ):
        check_data(Data(train=(str(tmp_path / "t.csv"),)))


def test_one_check_reads_the_first_headers_once_until_the_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []

    def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return read_headers(*arguments)

    monkeypatch.setattr("trainer.data.first_look.read_headers", counted)
    data = {"format": "webdataset", "train": (shard(tmp_path / "a.tar", 5, "txt"),)}
    job = tiny_job(data=data, optim={"positives": "captions"})
    for number, samples in enumerate((5, 9), 1):
        shard(tmp_path / "a.tar", samples, "txt")
        check_data(job.data)
        first = FirstSamples(job)
        assert (list(first.warnings()), len(first.captions)) == ([], samples)
        assert len(reads) == number


pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec's client lives as long as we


@pytest.mark.parametrize("far", [False, True])
def test_samples_are_counted_by_what_others_write_beside_shards(tmp_path: Path, far: bool) -> None:
    """Sizes, and img2dataset's statistics and tables; also where all of it is behind URLs."""
    for number in range(4):
        write_tar(tmp_path / f"{number}.tar", pair("a"))
    (tmp_path / "sizes.json").write_text(json.dumps({"0.tar": 3}))
    (tmp_path / "1_stats.json").write_text(json.dumps({"count": 9, "successes": 5}))
    status = ["success", "failed_to_download", "success", "failed_to_resize"]
    parquet.write_table(pyarrow.table({"status": status}), tmp_path / "2.parquet")
    with serving(tmp_path) if far else nullcontext((str(tmp_path), None)) as (place, _):
        for names, count in ((("{0..2}",), 10), (("{0..3}",), None), (("3", "0"), None)):
            assert check_data(Data(train=tuple(f"{place}/{name}.tar" for name in names))) == count


def test_storage_that_does_not_answer_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_data(Data(train=("http://127.0.0.1:9/0.tar",))) is None
    monkeypatch.setattr("trainer.data.sample_counts.ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert check_data(Data(train=(f"{address}/0.tar",))) is None


def test_shards_behind_urls_are_counted_by_the_index_that_the_job_names(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [member for key in "abcd" for member in pair(key)])
    with serving(tmp_path) as (address, handler):
        paths = [f"{address}/0.tar"]
        open_indexed(paths, tmp_path / "index")
        before = len(handler.asked)
        assert check_data(Data(train=tuple(paths), index=str(tmp_path / "index"))) == 4
        assert len(handler.asked) == before


def captions(data: Data) -> list[tuple[str, tuple[str, ...]]]:
    source = open_source(data)
    return [(raw.key, raw.captions) for raw in map(source.read, range(len(source)))]


def test_shards_of_webdatasets_own_writer_train_as_they_are(tmp_path: Path) -> None:
    with webdataset.ShardWriter(f"{tmp_path}/%06d.tar", maxcount=3, verbose=0) as writer:
        for number in range(7):
            row = {"jpg": picture(number, kind="jpeg"), "txt": f"number {number}", "json": {"n": number}}
            writer.write({"__key__": f"a.b/{number:03d}", **row})
    data = Data(train=(f"{tmp_path}/{{000000..000002}}.tar",))
    assert check_data(data) is None, "nothing beside the shards counts them"
    assert captions(data) == [(f"a.b/{number:03d}", (f"number {number}",)) for number in range(7)]


def test_what_img2dataset_leaves_trains_as_it_is_and_its_statistics_count(tmp_path: Path) -> None:
    """Writes img2dataset's webdataset output.

    Each key has jpg, txt and json members, each shard a parquet table and a `_stats.json`; an image that
    failed has no members.
    """
    for shard in range(2):
        members = []
        for number in range(3):
            key = f"{shard:05d}{number:04d}"
            row = {"url": "https://example.org/x.jpg", "key": key, "status": "success", "exif": "{}"}
            members += [
                (f"{key}.jpg", picture(number, kind="jpeg")),
                (f"{key}.json", json.dumps(row).encode()),
                (f"{key}.txt", f"picture {key}".encode()),
            ]
        write_tar(tmp_path / f"{shard:05d}.tar", members)
        statistics = {"count": 4, "successes": 3, "failed_to_download": 1, "status_dict": {}}
        (tmp_path / f"{shard:05d}_stats.json").write_text(json.dumps(statistics))
        (tmp_path / f"{shard:05d}.parquet").write_bytes(b"PAR1")
    data = Data(train=(f"{tmp_path}/*.tar",))
    assert check_data(data) == 6
    assert captions(data) == [
        (f"{shard:05d}{number:04d}", (f"picture {shard:05d}{number:04d}",))
        for shard in range(2)
        for number in range(3)
    ]


def test_login_node_without_numpy_looks_into_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.sample_counts.find_spec", lambda _: None)
    assert check_data(Data(train=(shard(tmp_path / "a.tar", 5, "json"),))) is None
