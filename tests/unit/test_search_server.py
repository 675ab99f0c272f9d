"""The page of `clipship search` over real HTTP: who gets an answer, and which pictures are served."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from tests.support.search_index import digits, index_of, search_model, serving, weights
from trainer.search.server import Server

MOST_RESULTS = 480


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("search")
    pictures = digits(folder / "pictures", 40)
    Image.new("RGB", (3000, 1500), "red").save(pictures / "large.jpg")
    (folder / "secret.png").write_bytes((pictures / "001.png").read_bytes())
    with serving(index_of(search_model(weights(folder)), pictures)) as running:
        yield running


def get(
    server: Server, path: str, host: str | None = None, method: str = "GET"
) -> tuple[HTTPResponse, bytes]:
    """Asks for this path exactly as it is, which no browser would."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def below(server: Server, place: str) -> str:
    return f"/{server.token}/{place}"


def searched(server: Server, text: str, **more: Any) -> tuple[int, dict[str, Any]]:
    query = "".join(f"&{name}={quote(str(value))}" for name, value in more.items())
    answer, content = get(server, below(server, f"search?text={quote(text)}{query}"))
    assert answer.getheader("Content-Type") == "application/json"
    found: dict[str, Any] = json.loads(content)
    return answer.status, found


def test_page_escapes_its_names_and_loads_nothing_from_elsewhere(server: Server) -> None:
    answer, content = get(server, below(server, ""))
    page = content.decode()
    assert answer.status == 200
    assert "41 pictures, compared with your text by tiny-vit &lt;from&gt; weights.pt." in page
    assert "//" not in page.replace("<!doctype html>", "")
    policy = answer.getheader("Content-Security-Policy") or ""
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.getheader("Referrer-Policy") == "no-referrer"
    for place, kind in (("page.css", "text/css"), ("page.js", "text/javascript")):
        answer, content = get(server, below(server, place))
        assert (answer.status, (answer.getheader("Content-Type") or "").partition(";")[0]) == (200, kind)
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert b"url(" not in content


def test_search_answers_with_the_nearest_pictures(server: Server) -> None:
    status, found = searched(server, "a handwritten seven", count=7)
    nearest = server.index.nearest("a handwritten seven", 7)
    assert status == 200
    assert found["pictures"] == 41
    assert [tuple(each.values()) for each in found["results"]] == [tuple(match) for match in nearest]
    similarity = [each["similarity"] for each in found["results"]]
    assert similarity == sorted(similarity, reverse=True)
    assert len(searched(server, "ü 😀 <b>", count=MOST_RESULTS)[1]["results"]) == 41


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        ("", {}, "Type a text"),
        ("x" * 1001, {}, "has 1,001 characters"),
        ("x", {"count": 0}, "count must be"),
        ("x", {"count": MOST_RESULTS + 1}, "count must be"),
        ("x", {"count": "000000000001"}, "count must be"),
        ("x", {"count": "9" * 5000}, "count must be"),
    ],
)
def test_search_says_what_it_cannot_answer(
    server: Server, text: str, more: dict[str, Any], expected: str
) -> None:
    status, found = searched(server, text, **more)
    assert status == 400
    assert expected in found["error"]


@pytest.mark.parametrize(
    "place",
    [
        *("picture/41", "picture/-1", "picture/", "picture/1/", "picture/+1", "picture/1.0", "picture/%31"),
        *("picture/../../secret.png", "picture/001.png", "picture//etc/passwd", "../../secret.png"),
        *("picture/\u0661".encode().decode("latin-1"), "picture/" + "1" * 4000, "picture/0000000000000001"),
        *("thumbnail/41", "other/1"),
        *("page.html.j2", "search/..", "page.js/..", "/", "%2e%2e/secret.png"),
    ],
)
def test_only_pictures_of_the_index_are_served(server: Server, place: str) -> None:
    answer, content = get(server, below(server, quote(place, safe="/%+.")))
    assert answer.status == 404
    assert content == b"There is no such page.\n"


@pytest.mark.parametrize(
    "path",
    ["/", "/x/", "//", "/page.js", "/TOKEN", "/picture/1", "/TOKENx/", "/%00/", "http://[::1/", "//[/", "["],
)
def test_nobody_without_the_token_gets_an_answer(server: Server, path: str) -> None:
    answer, content = get(server, path.replace("TOKEN", server.token[:-1]))
    assert answer.status == 404
    assert content == b"Open the address that the terminal shows.\n"


OWN = ("127.0.0.1", "localhost:9999", "LOCALHOST")  # the second through a tunnel with another port
OTHERS = (
    "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:80",
    "127.0.0.1@evil.example", ":80",
)  # fmt: skip


def test_another_name_of_this_machine_gets_no_answer(server: Server) -> None:
    found = {host: get(server, below(server, ""), host)[0].status for host in (*OWN, *OTHERS)}
    assert found == {**dict.fromkeys(OWN, 200), **dict.fromkeys(OTHERS, 403)}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_page_is_only_read(server: Server, method: str) -> None:
    assert get(server, below(server, ""), method=method)[0].status == 501


def test_a_picture_that_is_gone_is_said_to_be(server: Server) -> None:
    path: Path = server.index.folder.path / "003.png"
    number = server.index.names.index("003.png")
    content = path.read_bytes()
    path.write_text("not a picture any more")
    try:
        answer, said = get(server, below(server, f"thumbnail/{number}"))
    finally:
        path.write_bytes(content)
    assert (answer.status, said) == (410, b"This picture has been removed or changed.\n")
    assert get(server, below(server, f"thumbnail/{number}"))[0].status == 200


def test_every_start_has_another_token_and_listens_on_loopback_alone(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/{server.token}/"
    with Server(0) as other:
        assert other.token != server.token
        assert len(other.token) >= 22
