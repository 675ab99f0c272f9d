"""`clipship check` sees in an index and in the first samples what a run would refuse."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.cli.main import main
from trainer.config import Data
from trainer.data.check import check_data
from trainer.data.first_look import left_out_first
from trainer.data.formats import READERS
from trainer.data.source import open_source
from trainer.data.tar import DOTS, read_headers
from trainer.errors import InputError
from trainer.plan.first_samples import FirstSamples


def shard(path: Path, samples: int, ending: str, hidden: int = 0) -> str:
    """Writes samples, and beside them some that share the key `scan`."""
    keys = [*(f"{number:04d}" for number in range(samples)), *(f"scan.{number}" for number in range(hidden))]
    with tarfile.open(path, "w") as tar:
        for key in keys:
            for of in ("png", ending):
                member = tarfile.TarInfo(f"{key}.{of}")
                member.size = 3
                tar.addfile(member, io.BytesIO(b"abc"))
    return str(path)


def test_index_beside_the_shards_counts_their_samples(tmp_path: Path) -> None:
    data = Data(train=(shard(tmp_path / "a.tar", 5, "txt"),))
    assert check_data(data) is None
    assert main(["index", data.train[0]]) == 0
    assert check_data(data) == 5
    shard(tmp_path / "a.tar", 70, "txt")
    assert check_data(data) is None, "the index is older than the shard"


@pytest.mark.parametrize("indexed", [False, True])
def test_captions_with_another_ending_are_refused(tmp_path: Path, indexed: bool) -> None:
    data = Data(train=(shard(tmp_path / "a.tar", 5, "json"),))
    if indexed:
        main(["index", data.train[0]])
    with pytest.raises(InputError, match=r"Found .*\.json \(5\); a sample needs one of .* and a \.txt"):
        check_data(data)


@pytest.mark.parametrize("indexed", [False, True])
def test_what_a_run_would_refuse_for_its_bad_samples_check_refuses(
    tmp_path: Path, indexed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Data(train=(shard(tmp_path / "a.tar", 20, "txt", hidden=1100),))
    if indexed:
        main(["index", data.train[0]])
    said = r"bad samples: 1100 of 1120 \(1100 a dot in the name, where the key ends"
    for check in (check_data, open_source):
        with pytest.raises(InputError, match=said):
            check(data)
    assert check_data(data, "DATA") == (20 if indexed else None), "which commands that look at data ask"
    capsys.readouterr()
    assert main(["data", "stats", data.train[0]]) == 0
    assert json.loads(capsys.readouterr().out)["not_usable"] == {DOTS: 1100}


def test_a_first_shard_of_several_is_only_an_example(tmp_path: Path) -> None:
    paths = [shard(tmp_path / f"{name}.tar", 20, "txt", hidden=9 * (name == "a")) for name in "ab"]
    data = Data(train=tuple(paths), max_bad_share=0)
    assert check_data(data) is None
    assert left_out_first(paths[0], data) == f"{paths[0]}: 9 of its 29 samples are not used: 9 with {DOTS}"
    assert left_out_first(paths[1], data) == ""
    job = tiny_job(data={"format": "auto", "train": tuple(paths)}, optim={"positives": "captions"})
    assert list(FirstSamples(job).warnings()) == [left_out_first(paths[0], data)]


def test_login_node_without_numpy_says_how_to_check_without_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_numpy(*_: object) -> Any:
        raise ModuleNotFoundError(name="numpy")

    (tmp_path / "t.csv").touch()
    monkeypatch.setattr(READERS["table"], "check", no_numpy)
    with pytest.raises(
        InputError,
        match=r"^data.train: the Python package numpy .* has --no-data .* `resume` have --no-check",
    ):
        check_data(Data(train=(str(tmp_path / "t.csv"),)))


def test_login_node_without_numpy_looks_into_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.sample_counts.find_spec", lambda _: None)
    assert check_data(Data(train=(shard(tmp_path / "a.tar", 5, "json"),))) is None


def test_a_file_that_is_no_tar_is_refused_as_a_run_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(InputError, match=r"a.tar: not a readable tar file"):
        check_data(Data(train=(str(tmp_path / "a.tar"),)))


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
