"""Faults of stores, behind http and S3: nothing is lost or comes twice, or one sentence says why."""

import base64
import io
import json
import os
import ssl
import subprocess
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import fsspec
import pytest
from fsspec.implementations.http import HTTPFileSystem

from benchmarks.data_remote import store as slow_store
from benchmarks.data_remote_ours import counts
from tests.integration.test_bad_input import sample
from tests.support.command_line import clipship
from tests.support.loading import open_indexed, pair, refusal, unindexed, write_tar
from tests.support.loopback import answering
from tests.support.range_server import RETRY_AFTER_S, Ranges, serving
from tests.support.training import run, setup_of
from tests.unit.test_data_read_ahead import SHARDS, Order, batches, keys, opened
from tests.unit.test_data_read_ahead import shards as shards
from trainer.comm.protocol import Comm
from trainer.config import Data
from trainer.data import index
from trainer.data.arena import Arena
from trainer.data.changed import Unchanged
from trainer.data.files import Files
from trainer.data.pack import write_shards
from trainer.data.reading import TALLY
from trainer.data.sample import BadSample
from trainer.data.source import open_source
from trainer.data.storage import SETTINGS, client_options
from trainer.errors import InputError, StorageError

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec's clients live on
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0)
STORES = [
    "http",
    pytest.param("s3", marks=pytest.mark.skipif(find_spec("s3fs") is None, reason="s3fs is not installed")),
]


class Clock:
    """Time that passes only in waits, which it writes down."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.after: Callable[[float], object] = lambda now_s: None

    def sleep(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        self.after(sum(self.waits_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainer.run.retry.time", SimpleNamespace(sleep=clock.sleep))
    monkeypatch.setattr("trainer.data.files.STORE_WAITS_S", WAITS_S)
    monkeypatch.setattr("trainer.data.files._ANSWERING_PARTS", set())
    return clock


@pytest.fixture(params=STORES)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, type[Ranges]]]:
    """The beginning of addresses in a bucket, and the server's class; the bucket is a folder of the test."""
    (tmp_path / "bucket").mkdir()
    with serving(tmp_path) as (address, server):
        if request.param == "http":
            yield f"{address}/bucket", server
            return
        options = {"endpoint_url": address, "anon": True, "client_kwargs": {"region_name": "us-east-1"}}
        monkeypatch.setenv(SETTINGS, json.dumps({"s3": options}))
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own attempts wait for real
        monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
        yield "s3://bucket", server


@pytest.fixture
def content(tmp_path: Path, store: tuple[str, type[Ranges]]) -> bytes:
    content = os.urandom(5000)
    (tmp_path / "bucket" / "0.tar").write_bytes(content)
    return content


@pytest.mark.parametrize("fault", ["cut", "gone", "short", "503", "403", "500"])
def test_a_store_that_fails_now_and_then_gives_each_sample_once(
    fault: str, shards: str, store: tuple[str, type[Ranges]], tmp_path: Path, clock: Clock
) -> None:
    address, server = store
    for shard in Path(shards).parent.glob("*.tar"):
        (tmp_path / "bucket" / shard.name).symlink_to(shard)
    source = opened(f"{address}/{Path(shards).name}")
    server.faults.extend(["", fault, fault, ""] * 4)
    assert keys(source, (7, 16), epochs=1) == keys(opened(shards), (7, 16), epochs=1)
    assert not server.faults
    assert clock.waits_s or fault == "gone", "clients ask a server once more by themselves"


def test_a_store_is_waited_for_as_it_asks_and_named_where_it_stays_away(
    content: bytes, store: tuple[str, type[Ranges]], clock: Clock
) -> None:
    address, server = store
    server.faults.extend(["503", "503"])
    assert Files().read(f"{address}/0.tar", 10, 20) == content[10:30]
    assert clock.waits_s == [RETRY_AFTER_S, RETRY_AFTER_S]
    server.faults = deque(["gone"] * 100)
    with pytest.raises(StorageError, match=rf"{address}/0\.tar: cannot be read after 9 attempts in 40 s"):
        Files().read(f"{address}/0.tar", 10, 20)


def test_a_server_that_sends_the_whole_file_for_a_part_is_refused_or_asked_again(
    content: bytes, store: tuple[str, type[Ranges]], clock: Clock
) -> None:
    address, server = store
    server.faults.append("whole")
    with pytest.raises(InputError, match=r"more than the 20 bytes came that were asked for: .*\(Range\)"):
        Files().read(f"{address}/0.tar", 10, 20)
    assert not clock.waits_s
    for fault in ("", "whole"):
        server.faults.append(fault)
        assert Files().read(f"{address}/0.tar", 10, 20) == content[10:30]
    assert len(clock.waits_s) == 1, "it has answered a part before"


@pytest.mark.parametrize("left", [4000, 100])
def test_a_file_that_became_shorter_is_no_fault_of_the_store(
    left: int, content: bytes, store: tuple[str, type[Ranges]], tmp_path: Path, clock: Clock
) -> None:
    address, _ = store
    (tmp_path / "bucket" / "0.tar").write_bytes(content[:left])
    with pytest.raises(InputError, match=r"the file now ends .* bytes too early: it changed") as shorter:
        Files().read(f"{address}/0.tar", 3990, 20)
    assert not isinstance(shorter.value, StorageError)
    assert not clock.waits_s


def test_a_file_that_changed_under_the_run_is_named_and_no_mere_bad_sample(
    shards: str, store: tuple[str, type[Ranges]], tmp_path: Path
) -> None:
    address, _ = store
    first, second = (tmp_path / "bucket" / name for name in ("00.tar", "01.tar"))
    for file in (first, second):
        file.write_bytes((Path(shards).parent / file.name).read_bytes())
    paths = [f"{address}/00.tar", f"{address}/01.tar"]
    now_s = 0.0
    unchanged = Unchanged(open_indexed(paths, tmp_path / "index"), lambda: now_s)
    bad = [BadSample(path, "k", "not an image", "it is none") for path in paths]
    unchanged.check(bad)
    os.utime(first, (1, 1))
    unchanged.check([])
    now_s = 10.0
    unchanged.check(bad)
    first.write_bytes(recaptioned(first))
    unchanged.check(bad)
    now_s = 20.0
    with pytest.raises(InputError, match=rf"{paths[0]}: the file has changed under the run, .*Put back what"):
        unchanged.check(bad)
    now_s = 40.0
    unchanged.check(bad[1:])
    Unchanged(opened(shards)).check(bad)


def recaptioned(shard: Path) -> bytes:
    """The shard with shorter captions: every member lies where it lay."""
    out = io.BytesIO()
    with tarfile.open(shard) as old, tarfile.open(fileobj=out, mode="w") as new:
        for member in old:
            if member.name.endswith(".txt"):
                member.size = 5
                new.addfile(member, io.BytesIO(b"other"))
            else:
                new.addfile(member, old.extractfile(member))
    return out.getvalue()


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose headers are all read."""
    found: list[str] = []
    scan = index.scan

    def counted(path: str, *how: Any) -> Any:
        found.append(path)
        return scan(path, *how)

    monkeypatch.setattr(index, "scan", counted)
    return found


def test_a_local_file_that_changes_under_the_run_is_named_at_its_next_block(
    shards: str, tmp_path: Path, scans: list[str]
) -> None:
    """Its images can be decoded as before, and its captions would be cut in silence."""
    shard, content = tmp_path / "00.tar", (Path(shards).parent / "00.tar").read_bytes()
    shard.write_bytes(content)
    source = open_indexed([str(shard)], tmp_path / "index")
    scans.clear()
    os.utime(shard, (1, 1))
    for _ in range(2):
        source.read_block(7, 7, Arena())
    assert scans == [str(shard)], "a new time alone is looked into once"
    for changed in (recaptioned(shard), content + bytes(512)):
        shard.write_bytes(changed)
        with pytest.raises(
            InputError, match=rf"{shard}: the file has changed under the run, .*Put back what"
        ):
            source.read_block(14, 7, Arena())
    shard.write_bytes(content)
    source.read_block(14, 7, Arena())


def test_copies_on_a_nodes_own_disk_are_not_looked_into_one_by_one_and_another_file_is_found(
    shards: str, tmp_path: Path, scans: list[str]
) -> None:
    paths = [str(tmp_path / f"{number}.tar") for number in range(7)]
    for path in paths:
        Path(path).write_bytes((Path(shards).parent / "00.tar").read_bytes())
    source = open_indexed(paths, tmp_path / "index")
    for changed in (1, 1, 2):
        scans.clear()
        for number, path in enumerate(paths[:6]):
            os.utime(path, (changed, changed))
            source.read_block(40 * number, 7, Arena())
        assert len(scans) in (4, 0, 6), "each is, if its time is new once more"
        assert changed == 1 or len(scans) == 6
    size = Path(paths[6]).stat().st_size
    Path(paths[6]).write_bytes(recaptioned(Path(paths[6])))
    assert Path(paths[6]).stat().st_size == size
    assert f"{paths[6]}: the file has changed under the run" in refusal(source.read_block, 240, 7, Arena())


class PlainServer(SimpleHTTPRequestHandler):
    """Python's own web server: it has no ETag."""

    says_length = True

    def send_header(self, keyword: str, value: str) -> None:
        if type(self).says_length or keyword != "Content-Length":
            super().send_header(keyword, value)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_a_server_without_etags_tells_versions_by_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "0.tar"
    write_tar(file, pair("a"))
    with answering(partial(PlainServer, directory=str(tmp_path))) as server:
        address = f"{server}/0.tar"
        os.utime(file, (1, 1))
        open_indexed([address], tmp_path / "index")
        assert unindexed([address], tmp_path / "index") == []
        os.utime(file, (2, 2))
        assert unindexed([address], tmp_path / "index") == [address]
        monkeypatch.setattr(PlainServer, "says_length", False)
        with pytest.raises(InputError, match=r"0\.tar: the server does not say how long it is"):
            unindexed([address], tmp_path / "index")


# Web servers are asked as curl asks them: addresses as they stand, proxies, keys, certificates.

CONTENT = bytes(range(200))


class Server(BaseHTTPRequestHandler):
    """Answers each request with a part of CONTENT; `endless` is sent in its place until the client goes."""

    asked: list[tuple[str, str]]
    endless = False
    sent = 0

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()

    def do_GET(self) -> None:
        kind = type(self)
        kind.asked.append((self.path, self.headers.get("Authorization", "")))
        first, _, last = self.headers.get("Range", "bytes=0-199").removeprefix("bytes=").partition("-")
        part = CONTENT[int(first) : int(last) + 1]
        self.send_response(206)
        if not kind.endless:
            self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        try:
            self.wfile.write(part)
            while kind.endless and kind.sent < 2**28:
                kind.sent += self.wfile.write(bytes(2**16))
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def server() -> type[Server]:
    return type("Handler", (Server,), {"asked": []})


@pytest.fixture
def address(server: type[Server]) -> Iterator[str]:
    with answering(server) as address:
        yield address


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (signed := "/a.tar?sig=a%2Fb%3Ac%7Ed&t=1+2", signed),
        ("/a%2Fb/c.tar", "/a%2Fb/c.tar"),
        ("/a b/猫.tar", "/a%20b/%E7%8C%AB.tar"),
        ("/100%.tar", "/100%25.tar"),
    ],
)
def test_an_encoded_address_is_sent_as_it_stands(
    server: type[Server], address: str, path: str, sent: str
) -> None:
    assert Files().read(f"{address}{path}", 10, 20) == CONTENT[10:30]
    assert server.asked == [(sent, "")]


def test_keys_of_netrc_are_sent(
    server: type[Server], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password mine\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    Files().read(f"{address}/0.tar", 10, 20)
    assert server.asked == [("/0.tar", f"Basic {base64.b64encode(b'me:mine').decode()}")]


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_certificates_of_the_environment_are_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=own"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "own.pem"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")

    class Secured(Server):
        asked = []  # noqa: RUF012

        def setup(self) -> None:
            self.request: Any = context.wrap_socket(self.request, server_side=True)
            super().setup()

    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "own.pem"))
    HTTPFileSystem.clear_instance_cache()  # else it goes on with the certificates that it has
    with answering(Secured) as plain:
        address = plain.replace("http://", "https://")
        assert Files().read(f"{address}/{variable}.tar", 10, 20) == CONTENT[10:30]
    assert client_options("s3://b/0.tar")["client_kwargs"] == {"verify": str(tmp_path / "own.pem")}


def test_no_more_is_read_of_an_endless_answer_than_was_asked_for(server: type[Server], address: str) -> None:
    server.endless = True
    with pytest.raises(InputError, match=r"more than the 20 bytes came that were asked for"):
        Files().read(f"{address}/0.tar", 10, 20)
    assert server.sent < 2**26


def test_a_listing_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        fsspec.filesystem("memory").pipe(f"/listing-limit/{number}.tar", b"x")
    monkeypatch.setattr("trainer.data.shard_names._MOST_NAMES", 2)
    with pytest.raises(InputError, match=r"3 files match; at most 2 are allowed"):
        open_source(Data(train=("memory://listing-limit/*.tar",)))


# Costs of reading are counted in every process, and come out in metrics, status and report.


def cost(source: Any, order: Order, workers: int = 0) -> Any:
    """Cost of an epoch: of loader processes as their batches say it, and of this one."""
    TALLY.pop()
    sent = [batch.reading for batch in batches(source, order, workers=workers, epochs=1)]
    return sum(sent, TALLY.pop())


def test_requests_that_fail_count_and_so_do_headers_and_images_behind_addresses(
    shards: str, tmp_path: Path
) -> None:
    with serving(Path(shards).parent) as (address, server):
        TALLY.pop()
        source = opened(f"{address}/00.tar")
        assert TALLY.pop().requests == len(server.asked) > 0
        server.failures = 2
        source.read(0)
        assert TALLY.pop().requests == 3
        (table := tmp_path / "t.csv").write_text(f"image,caption\n{address}/01.tar,c\n")
        content = opened(table).read(0).image
        assert TALLY.pop()[:2] == (1, len(content))


def test_what_the_cache_had_is_counted_apart(shards: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    first = cost(opened(shards, cache=folder), (100, 16))
    assert first.requests == SHARDS
    second = cost(opened(shards, cache=folder), (100, 16))
    assert (second.requests, second.size) == (0, 0)
    assert second.cache_hits == first.requests + first.cache_hits


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_says_what_its_data_have_cost(tmp_path: Path, alone: Comm) -> None:
    (tmp_path / "data").mkdir()
    write_shards((sample(number) for number in range(64)), tmp_path / "data", 16)
    folder, train = tmp_path / "run", (str(tmp_path / "data" / "shard-{000000..000003}.tar"),)
    TALLY.pop()
    data = {"train": train, "format": "webdataset"}
    run(setup_of(folder, alone, dict, data=data, logging={"every_steps": 2}))
    (folder / "job.toml").write_text('name = "x"\n')
    records = [record for record in records_of(folder) if "read_requests" in record]
    assert sum(record["read_requests"] for record in records) > 0
    said = json.loads(clipship("status", folder, "--json", code=0).out)["reading"]
    assert said["requests"] == sum(record["read_requests"] for record in records)
    assert said["bytes"] == sum(record["read_bytes"] for record in records) > 0
    assert f"in {said['requests']} requests, whose waits add up to " in clipship("status", folder, code=0).out


def test_the_slow_store_waits_gives_ranges_and_counts(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(range(200)))
    with slow_store(tmp_path, 20) as address:
        start = time.monotonic()
        request = Request(f"{address}/0.tar", headers={"Range": "bytes=10-19"})
        assert urlopen(request).read() == bytes(range(10, 20))
        assert time.monotonic() - start >= 0.02
        assert len(urlopen(f"{address}/0.tar").read()) == 200
        pattern = f"{address}/{{0..3}}.tar"
        assert counts(pattern) == {"requests": 2, "bytes": 210}
        assert counts(pattern) == {"requests": 0, "bytes": 0}
        urlopen(f"{address}/stall/0.1").close()
        start = time.monotonic()
        urlopen(f"{address}/0.tar").close()
        assert time.monotonic() - start >= 0.1
    assert counts("/data/{0..3}.tar") == {"requests": 0, "bytes": 0}
