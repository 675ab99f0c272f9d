"""Web servers are asked as curl asks them: addresses as they stand, proxies, keys, certificates."""

import base64
import ssl
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.http import HTTPFileSystem

from tests.support.loopback import answering
from trainer.config import Data
from trainer.data.files import Files
from trainer.data.source import open_source
from trainer.data.storage import client_options
from trainer.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec's clients live on
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
