"""`clipship check` sees what a run would refuse, and counts samples."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.loading import pair, write_tar
from tests.support.range_server import serving
from trainer.config import Data
from trainer.data.check import check_data
from trainer.data.source import open_source
from trainer.errors import InputError
from trainer.plan.first_samples import FirstSamples

DOTS = "a dot in the name, where the key ends: rename a.b.jpg to a-b.jpg"


def shard(path: Path, samples: int, ending: str, hidden: int = 0) -> str:
    """Writes samples, and beside them some that share the key `scan`."""
    keys = [*(f"{number:04d}" for number in range(samples)), *(f"scan.{number}" for number in range(hidden))]
    return str(write_tar(path, [(f"{key}.{of}", b"abc") for key in keys for of in ("png", ending)]))


@pytest.mark.parametrize("indexed", [False, True])
def test_captions_with_another_ending_are_refused(tmp_path: Path, indexed: bool) -> None:
    data = Data(train=(shard(tmp_path / "a.tar", 5, "json"),))
    if indexed:
        clipship("index", data.train[0])
    with pytest.raises(InputError, match=r"Found .*\.json \(5\); a sample needs one of .* and a \.txt"):
        check_data(data)


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


def captions(data: Data) -> list[tuple[str, tuple[str, ...]]]:
    source = open_source(data)
    return [(raw.key, raw.captions) for raw in map(source.read, range(len(source)))]


def test_login_node_without_numpy_looks_into_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.sample_counts.find_spec", lambda _: None)
    assert check_data(Data(train=(shard(tmp_path / "a.tar", 5, "json"),))) is None
