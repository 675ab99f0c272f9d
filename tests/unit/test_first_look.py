"""`clipship check` sees in an index and in the first samples what a run would refuse."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from trainer.cli.main import main
from trainer.config import Data
from trainer.data.sample_counts import check_data
from trainer.errors import InputError


def shard(path: Path, samples: int, ending: str) -> str:
    with tarfile.open(path, "w") as tar:
        for number in range(samples):
            for of in ("png", ending):
                member = tarfile.TarInfo(f"{number:04d}.{of}")
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


def test_login_node_without_numpy_says_how_to_check_without_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_numpy(name: str) -> Any:
        raise ModuleNotFoundError(name="numpy")

    (tmp_path / "t.csv").touch()
    monkeypatch.setattr("trainer.data.sample_counts.load", no_numpy)
    with pytest.raises(
        InputError, match=r"data.train: the Python package numpy .* `clipship check --no-data`"
    ):
        check_data(Data(train=(str(tmp_path / "t.csv"),)))


def test_login_node_without_numpy_looks_into_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.sample_counts.find_spec", lambda _: None)
    assert check_data(Data(train=(shard(tmp_path / "a.tar", 5, "json"),))) is None


def test_shards_that_cannot_be_read_as_such_are_left_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar" * 1000)
    assert check_data(Data(train=(str(tmp_path / "a.tar"),))) is None
