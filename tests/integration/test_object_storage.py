"""Shards in object storage, on a real S3 server: the same batches as from a local disk."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from torch import Tensor

from tests.integration.test_bad_input import sample
from tests.support.jobs import tiny_job
from tests.support.loading import open_indexed, plain, rank_batches, unindexed
from tests.support.processes import until
from tests.support.runs import LIMIT_S, TinyRun, clipship, tiny_run
from tests.support.s3_server import KEY_ID, RCLONE, SECRET, s3_server
from trainer.config import Data, Eval
from trainer.data import files, shard_names
from trainer.data.pack import write_shards
from trainer.data.processes import start_process_server
from trainer.data.sample import RawSample, Source
from trainer.data.shard_names import expand_shards
from trainer.data.source import open_images, open_labelled, open_source
from trainer.data.storage import SETTINGS, use_storage
from trainer.data.store import remove
from trainer.errors import InputError, StorageError
from trainer.evaluate.inputs import check_evaluation, class_names

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: `make venv`")
pytestmark = [
    pytest.mark.skipif(not RCLONE.exists(), reason="rclone is not installed beside this Python: `make venv`"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # fsspec's clients live as long as the process
]
NAMES = "shard-{000000..000003}.tar"
SHARDS = f"s3://shards/{NAMES}"


@pytest.fixture(autouse=True)
def keys_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this machine's own keys nor what another test's job says."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv(SETTINGS, "{}")
    monkeypatch.setattr(files, "STORE_WAITS_S", (0.0,))
    s3fs.S3FileSystem.clear_instance_cache()  # a client keeps the keys that it has found
    shard_names._in_store.cache_clear()


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    start_process_server()
    folder = tmp_path_factory.mktemp("s3") / "buckets"
    for bucket in ("shards", "evals", "packed", "copies", "away"):  # the server sees no later ones
        (folder / bucket).mkdir(parents=True)
    write_shards((sample(number) for number in range(64)), folder / "shards", 16)
    return folder


@pytest.fixture(scope="module")
def with_keys(buckets: Path) -> Iterator[str]:
    with s3_server(buckets, keys=True) as address:
        yield address


def give_keys(monkeypatch: pytest.MonkeyPatch, secret: str = SECRET) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def one_size(raw: RawSample, seed: int) -> Tensor:
    """The last bytes of the file as a picture, and one that the position decides."""
    assert isinstance(raw.image, bytes)
    return plain(replace(raw, image=raw.image[-64:]), seed)


def loaded(source: Source, workers: int = 0) -> list[tuple[list[str], list[str], bytes]]:
    """Keys, captions and pixels of each batch of an epoch."""
    batches = rank_batches(source, (7, 16), 16, pixels=one_size, workers=workers, epochs=1)
    return [(batch.keys, batch.captions, batch.images.numpy().tobytes()) for batch in batches]


def of_storage(**keys: Any) -> Data:
    data = {"train": (SHARDS,), "format": "webdataset", **keys}
    job = tiny_job(data=data)
    use_storage(job)
    return job.data


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_a_bucket_are_those_of_a_local_disk(
    buckets: Path, with_keys: str, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    expected = loaded(open_source(Data(train=(str(buckets / "shards" / NAMES),))))
    assert len(expected) == 4
    give_keys(monkeypatch)
    data = of_storage(storage={"endpoint": with_keys, "region": "us-east-1"})
    assert loaded(open_source(data), workers) == expected
    monkeypatch.setenv("AWS_ENDPOINT_URL", with_keys)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert loaded(open_source(of_storage()), workers) == expected, "as `clipship index` reads them"


def test_an_evaluation_reads_where_the_data_lie(
    buckets: Path, with_keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled = (
        (f"{number:03d}", {"jpg": b"x%d" % number, "cls": b"%d" % (number % 2)}) for number in range(8)
    )
    write_shards(labelled, buckets / "evals", 4)
    rows = {"image": [b"one", b"two"], "caption": ["a", "b"]}
    parquet.write_table(pyarrow.table(rows), buckets / "evals" / "pairs.parquet")
    (buckets / "evals" / "names.txt").write_text("ant\nbee\n")
    give_keys(monkeypatch)
    of_storage(storage={"endpoint": with_keys, "region": "us-east-1"})
    shards = "shard-{000000..000001}.tar"
    here, far = (
        Eval(zero_shot=(f"{place}/{shards}",), class_names=f"{place}/names.txt")
        for place in (str(buckets / "evals"), "s3://evals")
    )
    check_evaluation(far)
    assert class_names(far) == ("ant", "bee")
    assert contents(open_labelled(far)) == contents(open_labelled(here)) != []
    for name in ("pairs.parquet", shards):
        pairs, same = (
            contents(open_images(Data(train=(f"{place}/{name}",), caption_key=("cls",))))
            for place in ("s3://evals", str(buckets / "evals"))
        )
        assert pairs == same != []
    with pytest.raises(InputError, match=r"s3://evals/none\.txt cannot be read \(No such file"):
        class_names(far.model_copy(update={"class_names": "s3://evals/none.txt"}))


def contents(source: Source) -> list[tuple[object, ...]]:
    samples = map(source.read, range(len(source)))
    return [(sample.key, sample.image, sample.captions, sample.label) for sample in samples]


def test_a_bucket_that_asks_for_no_keys_is_indexed_once_and_kept_on_the_node(
    buckets: Path, tmp_path: Path
) -> None:
    expected = loaded(open_source(Data(train=(str(buckets / "shards" / NAMES),))))
    with s3_server(buckets, keys=False) as address:
        data = of_storage(
            storage={"endpoint": address, "anonymous": True}, cache=str(tmp_path / "kept"), cache_gb=1
        )
        folder = tmp_path / "index"
        source = open_indexed(data.train, folder, cache=data.cache, cache_gb=1, storage=data.storage)
        assert unindexed(source.index.paths, folder, storage=data.storage) == []
        assert loaded(source) == expected
    assert loaded(source) == expected, "the server is gone, and all of it lies in data.cache"


def test_keys_that_are_wrong_or_missing_are_one_sentence(
    with_keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = of_storage(storage={"endpoint": with_keys, "region": "us-east-1"})
    for secret in (None, "another-s3cr3t"):
        if secret:
            give_keys(monkeypatch, secret)
        with pytest.raises(InputError, match=r"000000\.tar: S3 denies access .*AWS_ACCESS_KEY_ID") as refused:
            unindexed(expand_shards(data.train), Path("index"))
        assert len(str(refused.value).splitlines()) == 1
        assert not isinstance(refused.value, StorageError)
        assert "s3cr3t" not in str(refused.value)


def test_keys_that_are_renewed_in_mid_run_are_taken(
    with_keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(kept))
    monkeypatch.setattr(time, "sleep", lambda _: write_credentials(kept, SECRET))
    write_credentials(kept, "expired-s3cr3t")
    of_storage(storage={"endpoint": with_keys, "region": "us-east-1"})
    first = expand_shards([SHARDS])[0]
    assert len(files.Files().read(first, 0, 512)) == 512
    monkeypatch.setattr(time, "sleep", lambda _: None)
    write_credentials(kept, "expired-s3cr3t")
    files._forget_keys(first)
    with pytest.raises(StorageError, match="they have expired or were withdrawn: with new ones the run goes"):
        files.Files().read(first, 0, 512)


def write_credentials(file: Path, secret: str) -> None:
    file.write_text(f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {secret}\n")


def test_what_is_packed_into_a_bucket_is_what_is_packed_here(
    buckets: Path, with_keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_keys(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", with_keys)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    rows = {"image": [sample(number)[1]["png"] for number in range(6)], "caption": list("abcdef")}
    parquet.write_table(pyarrow.table(rows), tmp_path / "t.parquet")
    words = ("pack", "t.parquet", "--samples-per-shard", "2", "--processes", "2")
    for out in ("here", "s3://packed/there"):
        done = clipship(*words[:2], out, *words[2:], cwd=tmp_path)
    assert done.stdout == "s3://packed/there/shard-{000000..000002}.tar\n"
    there = {path.name: path.read_bytes() for path in (buckets / "packed" / "there").iterdir()}
    here = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir() if path.is_file()}
    assert there == here
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "t.parquet"]
    none = clipship(*words[:2], "s3://none/other", *words[2:], cwd=tmp_path, code=2)
    assert "cannot be written: FileNotFoundError('The specified bucket does not exist')" in none.stderr
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-s3cr3t")
    refused = clipship(*words[:2], "s3://packed/other", *words[2:], cwd=tmp_path, code=2)
    assert "s3://packed/other: S3 denies access" in refused.stderr
    assert "another-s3cr3t" not in refused.stderr


def test_a_run_writes_its_keys_nowhere_and_goes_on_from_its_copy_on_a_new_machine_as_if_it_had_not_stopped(
    buckets: Path, with_keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_keys(monkeypatch)
    old, new = TinyRun(tmp_path / "old"), TinyRun(tmp_path / "new")
    old.folder.mkdir()
    new.folder.mkdir()
    job = old.write(
        data={
            "train": [SHARDS],
            "format": "webdataset",
            "workers": 1,
            "storage": {"endpoint": with_keys, "region": "us-east-1"},
        },
        optim={"global_batch_size": 16, "steps": 10},
        checkpoint={"every_steps": 3, "keep": 2, "copy_to": "s3://copies/of/mine"},
    )
    checked = clipship("check", job, "--nproc", "1", cwd=old.folder)
    assert "64 samples" in checked.stdout, "counted by the sizes.json beside the shards"
    assert "each whole checkpoint goes to s3://copies/of/mine/tiny" in checked.stdout
    assert not list((buckets / "copies").rglob("*.clipship*")), "check leaves nothing behind"
    whole = old.start(1)
    copy = buckets / "copies" / "of" / "mine" / "tiny"
    last = copy / "checkpoints" / "step-00000010" / "manifest.json"
    earlier, newest = sorted(copy.rglob("manifest.json"))
    assert newest == last
    assert {"copied_step": 10, "copies_behind": 0}.items() <= old.result().items()
    told = clipship("status", old.run, cwd=old.folder)
    assert "step 10 in s3://copies/of/mine/tiny" in told.stdout
    losses = old.losses()
    assert written_with_secret(old.run) == []
    assert SECRET not in whole.stdout
    shutil.rmtree(old.folder)
    monkeypatch.setenv("AWS_ENDPOINT_URL", with_keys)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    remove(f"s3://copies/of/mine/tiny/{last.relative_to(copy)}")  # as if its machine was lost while it copied
    resumed = clipship("resume", "s3://copies/of/mine/tiny", cwd=new.folder)
    assert f"fetched {earlier.parent.name} from s3://copies/of/mine/tiny" in resumed.stderr
    assert new.losses() == losses
    assert last.is_file()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-s3cr3t")
    doctor = clipship("doctor", new.run / "job.toml", "--nproc", "2", cwd=new.folder, code=2)
    assert "S3 denies access" in doctor.stderr
    assert "give the ranks keys that may write it" in doctor.stderr
    again = clipship("resume", "s3://copies/of/mine/tiny", cwd=new.folder, code=2)
    assert "runs/tiny is there already" in again.stderr
    assert written_with_secret(new.run, copy) == []


def written_with_secret(*folders: Path) -> list[Path]:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert files
    return [file for file in files if SECRET.encode() in file.read_bytes()]


def copied(run: TinyRun) -> bool:
    record = run.run / "copies.json"
    return record.exists() and json.loads(record.read_text())["step"] is not None


STEPS = 80
"""Steps of a run that goes on for seconds after its first copy: long enough to end the store meanwhile."""


def test_a_store_that_goes_away_stops_no_run(
    buckets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_keys(monkeypatch)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    run = tiny_run(
        tmp_path,
        optim={"steps": STEPS},
        checkpoint={"every_steps": 1, "keep": 2, "copy_to": "s3://away", "copy_wait_s": 0.5},
    )
    with s3_server(buckets, keys=True) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        started = subprocess.Popen(
            run.command(1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        until(lambda: copied(run), started, every_s=0.01)
    _, told = started.communicate(timeout=LIMIT_S)
    assert started.returncode == 0, told
    assert run.last_step() == STEPS
    result = run.result()
    assert 0 < result["copied_step"] < STEPS
    assert result["copies_behind"] > 0
    assert "copy_failed" in result
    log = (run.run / "logs" / "rank-00000.log").read_text()
    assert "the last checkpoint is NOT COPIED to s3://away/tiny" in log
    assert sorted(path.name for path in (run.run / "checkpoints").glob("step-*")) == [
        f"step-{step:08d}" for step in (STEPS - 1, STEPS)
    ]


def test_a_glob_names_the_objects_of_a_bucket(
    buckets: Path, with_keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists them once a process, in natural order; a name that only looks like a glob is one, too."""
    for name in ("odd[1].tar", "odd1.tar"):
        (buckets / "away" / name).write_bytes(b"x")
    (buckets / "away" / "shard-1.tar").mkdir()
    for number in (2, 10):
        (buckets / "away" / f"shard-{number}.tar").write_bytes(b"x")
    give_keys(monkeypatch)
    of_storage(storage={"endpoint": with_keys, "region": "us-east-1"})
    every = expand_shards([SHARDS])
    assert expand_shards(["s3://shards/shard-*.tar"]) == every
    assert expand_shards(["s3://shards/shard-00000[12].tar", "s3://away/shard-[12]*.tar"]) == [
        *every[1:3], "s3://away/shard-2.tar", "s3://away/shard-10.tar",
    ]  # fmt: skip
    assert expand_shards(["s3://away/odd[1].tar"]) == ["s3://away/odd[1].tar"]
    with pytest.raises(InputError, match=r"s3://shards/none-\*\.tar: no file matches"):
        expand_shards(["s3://shards/none-*.tar"])
    data = of_storage(train=("s3://shards/shard-*.tar",), storage={"endpoint": with_keys})
    assert loaded(open_source(data)) == loaded(open_source(Data(train=(str(buckets / "shards" / NAMES),))))
    give_keys(monkeypatch, "another-s3cr3t")
    s3fs.S3FileSystem.clear_instance_cache()
    assert expand_shards(["s3://shards/shard-*.tar"]) == every, "it is not asked again"
    with pytest.raises(InputError, match=r"s3://evals/\*\.tar: S3 .*denies access"):
        expand_shards(["s3://evals/*.tar"])
