"""`[data.storage]`: what it means for each kind of store, and what has no place in a job file."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.check import found
from tests.support.jobs import tiny_job
from tests.support.s3_server import KEY_ID, RCLONE, SECRET, s3_server
from trainer.config import Job
from trainer.config.loader import job_from_table
from trainer.config.stores import STORES
from trainer.data.answers import asked_wait_s, denied_text, is_denied
from trainer.data.files import file_system
from trainer.data.storage import SETTINGS, client_options, use_storage
from trainer.errors import InputError

SHARDS = {
    "s3fs": "s3://b/0.tar",
    "gcsfs": "gs://b/0.tar",
    "ossfs": "oss://b/0.tar",
    "obs": "obs://b/0.tar",
    "adlfs": "az://b/0.tar",
}
MINIO = "https://minio.example.org:9000"


def stored(address: str, **storage: Any) -> Job:
    return tiny_job(data={"train": (address,), "format": "webdataset", "storage": storage})


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what a test's job says."""
    monkeypatch.setenv(SETTINGS, "{}")
    for variable in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(variable, raising=False)
    for row in STORES:
        for variable in row.from_variables.values():
            monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("package", "storage", "options"),
    [
        ("s3fs", {}, {}),
        (
            "s3fs",
            {"endpoint": MINIO, "region": "RegionOne", "ca_bundle": "/etc/ca.pem"},
            {"endpoint_url": MINIO, "client_kwargs": {"region_name": "RegionOne", "verify": "/etc/ca.pem"}},
        ),
        ("s3fs", {"anonymous": True, "requester_pays": True}, {"anon": True, "requester_pays": True}),
        ("gcsfs", {"anonymous": True, "endpoint": MINIO}, {"token": "anon", "endpoint_url": MINIO}),
        ("ossfs", {"anonymous": True}, {"key": None}),
        ("obs", {"endpoint": MINIO}, {"endpoint_url": MINIO}),
        ("adlfs", {"endpoint": "https://me.blob.example.org"}, {"account_host": "me.blob.example.org"}),
    ],
)
def test_each_store_gets_the_options_of_its_own_package(
    package: str, storage: dict[str, Any], options: dict[str, Any]
) -> None:
    use_storage(stored(SHARDS[package], **storage))
    assert client_options(SHARDS[package]) == options
    assert client_options("/local/0.tar") == {}


def test_the_keys_of_a_package_that_reads_no_variable_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "s3cr3t")
    use_storage(stored(SHARDS["ossfs"], endpoint=MINIO))
    assert client_options(SHARDS["ossfs"]) == {"endpoint": MINIO, "key": "id", "secret": "s3cr3t"}
    assert "s3cr3t" not in os.environ[SETTINGS]


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ({"secret": "s3cr3tvalue"}, "secret looks like a key to the storage, .* AWS_SECRET_ACCESS_KEY"),
        ({"connection_string": "AccountKey=s3cr3tvalue"}, "connection_string looks like a key"),
        ({"region": "AKIAS3CR3TVALUE12345"}, "region looks like a key"),
        ({"endpoint": "https://me:s3cr3tvalue@minio.example.org"}, "endpoint looks like a key"),
        ({"endpoint": "https://minio.example.org/?sig=s3cr3tvalue"}, "endpoint looks like a key"),
        ({"endpoint": "minio.example.org:9000"}, "must be the address of a server"),
        ({"endpoint": "file:///etc/passwd"}, "must be the address of a server"),
        ({"endpoint": "https://a\nb"}, "must be one line"),
        ({"region": "$(id)"}, "region"),
        ({"endpiont": MINIO}, "did you mean data.storage.endpoint"),
        ({"region": "eu"}, r"region: Google Cloud Storage \(gs://, gcs://\) has no such setting"),
    ],
)
def test_what_no_store_can_be_told_is_refused_without_its_value(storage: dict[str, Any], said: str) -> None:
    address = SHARDS["gcsfs" if "no such setting" in said else "s3fs"]
    data = {"train": [address], "storage": storage}
    job = {"name": "x", "data": data, "optim": {"global_batch_size": 16, "steps": 1}}
    with pytest.raises(InputError, match=said) as refused:
        job_from_table(job, "a test's job")
    assert "s3cr3tvalue" not in str(refused.value).lower()


def test_check_says_which_store_is_asked_and_where_its_keys_come_from() -> None:
    job = stored(SHARDS["s3fs"], endpoint=MINIO, region="eu-1")
    keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the machine or pod"
    assert found(job, "--no-data")["rows"]["storage"] == [
        f"S3 through s3fs, at {MINIO}, region eu-1; keys: {keys}"
    ]
    assert "storage" not in found(tiny_job(), "--no-data")["rows"]


@pytest.mark.parametrize("row", STORES, ids=lambda row: row.package)
def test_a_store_that_denies_access_says_what_gives_it(row: Any) -> None:
    address = f"{row.protocols[0]}://bucket/0.tar"
    assert is_denied(address, PermissionError("Access Denied"))
    assert not is_denied("/shards/0.tar", PermissionError(13, "Permission denied"))
    assert row.keys in denied_text(address, PermissionError("Access Denied"))


class OfBotocore(Exception):
    """As botocore's errors are, which carry the answer's headers."""

    def __init__(self, status: int, wait: str) -> None:
        headers = {"retry-after": wait}
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers}}


@pytest.mark.parametrize(
    ("said", "wait_s"),
    [
        ("7", 7.0),
        ("3600", 30.0),
        ("-1", 0.0),
        ("nan", 0.0),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0),
    ],
)
def test_a_store_says_how_long_to_wait_within_reason(said: str, wait_s: float) -> None:
    error = OSError("busy")
    error.__cause__ = OfBotocore(503, said)
    assert asked_wait_s(error) == wait_s
    assert not is_denied("s3://b/0.tar", error)
    assert is_denied("s3://b/0.tar", OfBotocore(403, said))


@pytest.mark.skipif(not RCLONE.exists(), reason="rclone is not installed beside this Python: `make venv`")
def test_obs_is_read_by_the_protocol_of_s3_with_its_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed: `make venv`")
    (tmp_path / "buckets/b").mkdir(parents=True)
    (tmp_path / "buckets/b/0.tar").write_bytes(b"content")
    with s3_server(tmp_path / "buckets", keys=True) as address:
        monkeypatch.setenv("OBS_ACCESS_KEY_ID", KEY_ID)
        monkeypatch.setenv("OBS_SECRET_ACCESS_KEY", SECRET)
        use_storage(stored(SHARDS["obs"], endpoint=address))
        opened = file_system(SHARDS["obs"])
        assert opened.cat_file(SHARDS["obs"]) == b"content"
        assert [entry.rpartition("/")[2] for entry in opened.ls("obs://b", detail=False)] == ["0.tar"]
