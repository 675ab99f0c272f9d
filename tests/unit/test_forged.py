"""Files that were forged, or are of another form, end in one sentence: features, lists, indexes, shards."""

import gzip
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.check import problems
from tests.support.command_line import clipship
from tests.support.features import ABOUT, features
from tests.support.jobs import TOY_JOB, VIT, tiny_job
from tests.support.pictures import picture
from tests.support.tables import write_parquet
from tests.support.thread_ranks import one_rank
from trainer.cli.main import main
from trainer.config import Data, Job
from trainer.config.loader import dump_job
from trainer.data.check import check_data
from trainer.data.distributed_index import open_targets, open_together
from trainer.data.feature_files import read_by
from trainer.data.pack import write_shard
from trainer.data.sample import BadSample
from trainer.data.source import open_source
from trainer.errors import InputError
from trainer.plan.trained import evaluation_job
from trainer.search.features import ShardPictures


@pytest.mark.parametrize(
    "about",
    [
        *("[" * 100_000, "5", "[1]"),
        *({**ABOUT, "logit_scale": value} for value in (math.nan, math.inf, 1e30, "x", None)),
        *({**ABOUT, "logit_bias": value} for value in (math.nan, "x")),
        *({**ABOUT, "width": value} for value in (0, "2", 2.5, None)),
        *({**ABOUT, "views": -1}, {**ABOUT, "bad": 5}, {**ABOUT, "size": "1"}, {**ABOUT, "model": 7}),
    ],
)
def test_what_features_say_of_themselves_is_believed_within_reason(tmp_path: Path, about: object) -> None:
    features(tmp_path / "f" / "0.parquet", ABOUT)
    words = ("duplicates", tmp_path / "f", "--out", tmp_path / "near.parquet")
    assert json.loads(clipship(*words, code=0).out)["pictures"] == 2
    features(tmp_path / "f" / "1.parquet", about)
    assert "1.parquet is no file of features" in clipship(*words, code=2).err


def lists(values: list[float], size: int) -> Any:
    return pyarrow.FixedSizeListArray.from_arrays(np.array(values, dtype=np.float16), size)


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        ({"drop": "problem"}, "problem"),
        ({"drop": "key"}, "key"),
        ({"statistics": False}, "the least and the largest row"),
        ({"key": [7, 8]}, "the least and the largest key"),
        ({"image": lists([1.0] * 6, 3)}, "one feature for each row"),
        ({"image": lists([1.0] * 8, 4)}, "one feature for each row"),
        ({"image": lists([1.0, math.nan, 1.0, 1.0], 2)}, "no finite numbers"),
        ({"text": ["a", "b"]}, "no finite numbers|reshape"),
    ],
)
def test_features_of_another_form_are_no_targets(tmp_path: Path, forged: dict[str, Any], why: str) -> None:
    write_shard([(f"k{n}", {"png": picture(n), "txt": b"c"}) for n in range(2)], tmp_path / "0.tar")
    job = tiny_job(
        data={"format": "auto", "train": (f"{tmp_path}/0.tar",)}, model={"targets": (f"{tmp_path}/f",)}
    )
    comm: Any = one_rank()
    status = os.stat(tmp_path / "0.tar")
    about = {**ABOUT, "size": status.st_size, "changed": str(status.st_mtime_ns)}
    about["read_by"] = read_by(job.data, job.seed, 0)
    source: Any = open_together(job, comm)

    def found(**columns: Any) -> object:
        features(tmp_path / "f" / "0.parquet", about, **columns)
        targets: Any = open_targets(job, source, comm)
        return targets.beside(source).read(0).target

    assert found() is not None
    with pytest.raises(InputError, match=rf"0.parquet: cannot be read as a table: .*({why})"):
        found(**forged)


@pytest.mark.parametrize(
    "forged",
    [{"drop": "image"}, {"image": lists([math.nan] * 4, 2)}, {"image": [1.0, 2.0]}, {"drop": "caption"}],
)
def test_features_of_another_form_are_not_searched(tmp_path: Path, forged: dict[str, Any]) -> None:
    features(tmp_path / "f" / "1.parquet", ABOUT, **forged)
    said = clipship("duplicates", tmp_path / "f", "--out", tmp_path / "near.parquet", code=2).err
    assert "1.parquet: cannot be read as a table" in said


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(2))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        npy(np.array([{}], dtype=object), allow_pickle=True),
        npz(),
        b"PK\3\4",
        b"\x93NUMPY\1\0\x10\0{'descr': '<u8'  ",
        npy(np.zeros((2, 2), dtype=np.uint64))[:-9],
        npy(np.zeros((2, 2), dtype=np.uint64)).replace(b"(2, 2), }", b"(2, 2**60), }"[:9]),
        npy(np.zeros((2, 2), dtype="U4")),
        npy(np.zeros((), dtype="U4")),
        npy(np.zeros(3, dtype=[("a", "<u8", (2,)), ("b", "<u8")])),
        npy(np.zeros((2, 3), dtype=np.uint64)),
    ],
)
def test_a_list_of_another_form_is_named_without_numpys_advice(tmp_path: Path, content: bytes) -> None:
    write_shard([("k0", {"png": picture(0), "txt": b"c"})], tmp_path / "0.tar")
    (tmp_path / "keys.npy").write_bytes(content)
    data = Data(
        train=(f"{tmp_path}/0.tar",),
        scores=(f"{tmp_path}/keys.npy",),
        scores_by="key",
        filters=("scores:listed == true",),
    )
    with pytest.raises(InputError, match=r"keys.npy (cannot be read as a list of keys|holds)") as told:
        open_source(data)
    assert "allow_pickle" not in str(told.value)


def test_check_names_a_filter_that_orders_true_and_false(tmp_path: Path) -> None:
    write_shard([("k0", {"png": picture(0), "txt": b"c"})], tmp_path / "0.tar")
    parquet.write_table(pyarrow.table({"key": ["k0"], "x": [True]}), tmp_path / "s.parquet")
    data = {"train": (f"{tmp_path}/0.tar",), "format": "auto", "scores": (f"{tmp_path}/s.parquet",)}
    said = problems(tiny_job(data={**data, "filters": ("scores:x > 0",)}))
    assert re.search(r"data.filters: .*x is true or false", said)


@pytest.mark.parametrize(
    ("content", "count"), [(b"garbage" * 3000, 1), (b"", 2), (gzip.compress(bytes(10240), mtime=0), 2)]
)
def test_check_refuses_shards_that_the_run_refuses(tmp_path: Path, content: bytes, count: int) -> None:
    for number in range(count):
        (tmp_path / f"{number}.tar").write_bytes(content)
    job = tmp_path / "job.toml"
    job.write_text(TOY_JOB.replace('format = "synthetic"', f'train = "{tmp_path}/*.tar"'))
    assert "0.tar: not a readable tar file" in clipship("check", job, code=2).err


# Addresses that stand in others' data choose no protocol, no endpoint and no folder that is written.

CHAINS = ("simplecache::http://127.0.0.1:9/0.tar", "http://127.0.0.1:9/a::reference://b", "s3://a::file:///b")
FOREIGN = (*CHAINS, "reference://a", "file:///etc/passwd", "{s3,reference}://a/0.tar", "http:/a://b")


def trained_by(folder: Path, **sections: Any) -> Path:
    """A checkpoint whose manifest says that a job with these sections trained it."""
    step = folder / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step / "model.pt").touch()
    job = tiny_job(model={"name": VIT}).model_dump(mode="json")
    for name, section in sections.items():
        job[name] = {**job[name], **section}
    (step / "manifest.json").write_text(json.dumps({"step": 1, "job": job}))
    return step


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.plan.trained.check_evaluated", lambda _job: None)


@pytest.mark.parametrize("chain", CHAINS)
def test_no_chain_of_file_systems_is_opened(chain: str) -> None:
    with pytest.raises(InputError, match=r"is a chain of file systems \(::\), which are not opened"):
        check_data(Data(train=(chain,)))


@pytest.mark.parametrize("address", FOREIGN)
@pytest.mark.parametrize("key", ["retrieval", "zero_shot"])
def test_a_checkpoint_names_no_address_of_another_protocol(
    tmp_path: Path, key: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = trained_by(tmp_path, eval={key: [address]})
    assert main(["eval", str(step)]) == 2
    told = capsys.readouterr().err
    assert "evaluated on" in told
    assert "give the data with --data or --zero-shot" in told
    assert evaluation_job(str(step), None, {"retrieval": ("a.tar",), "zero_shot": ()}, 1, ()).eval.retrieval


@pytest.mark.parametrize("address", FOREIGN)
def test_a_picture_and_a_shard_of_features_have_no_address_of_another_protocol(
    tmp_path: Path, address: str
) -> None:
    columns = {"image": [address], "caption": ["c"]}
    table = open_source(Data(train=(write_parquet(tmp_path / "t.parquet", columns),)))
    with pytest.raises(BadSample, match=r"address of none of|is a chain"):
        table.read(0)
    with pytest.raises(InputError, match=r"address of none of|is a chain"):
        ShardPictures(Path(), tiny_job(), {"a": (address, 0)}).decoded("a")


def test_a_checkpoint_chooses_no_endpoint_and_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own: dict[str, Any] = {"data": {"storage": {"endpoint": "https://mine.example.org"}, "cache": "/mine"}}
    theirs: dict[str, Any] = {
        "data": {"storage": {"endpoint": "https://evil.example.org", "anonymous": True}, "cache": "/evil"},
        "model": {"cache_dir": "/evil"},
        "eval": {"retrieval": ["s3://bucket/0.tar"]},
    }

    def evaluated(name: Path, *texts: str) -> Job:
        return evaluation_job(str(name), None, {}, 1, texts)

    job = evaluated(trained_by(tmp_path / "runs" / "own", **theirs))
    assert (job.data.storage.given, job.data.cache, job.model.cache_dir) == ({}, None, None)
    assert "data.storage and data.cache of the run that trained it are not used" in capsys.readouterr().err
    file = tmp_path / "job.toml"
    text = dump_job(tiny_job(name="own", logging={"runs": str(tmp_path / "runs")}, **own))
    for path in (file, tmp_path / "runs" / "own" / "job.toml"):
        path.write_text(text)
    job = evaluated(file)
    assert job.data.storage.given == own["data"]["storage"]
    assert (job.data.cache, job.model.cache_dir) == ("/mine", None)
