"""`clipship search`: which pictures it finds, what it keeps for the next start, and what it refuses."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from tests.listeners import listeners
from tests.support.command_line import clipship
from tests.support.jobs import VIT
from tests.support.processes import ended_on_failure
from tests.support.ready import ready
from tests.support.search_index import (
    digits,
    embedded,
    index_of,
    index_of_features,
    nearest,
    opened,
    search_model,
    serving,
    weights,
)
from trainer.cli.main import main
from trainer.errors import InputError
from trainer.search.model import SearchModel
from trainer.search.server import Server

Capture = pytest.CaptureFixture[str]
COUNT = 70  # more than a block of the model's


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def model(trained: Path) -> SearchModel:
    return search_model(trained)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pictures; what is kept goes into a folder beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return digits(tmp_path / "pictures", COUNT)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kept.npz"


def search(trained: Path, images: Path, *words: str) -> list[str]:
    return ["search", str(trained), "--model", VIT, "--images", str(images), *words]


def test_a_second_start_embeds_only_new_and_changed_pictures(
    model: SearchModel, images: Path, kept: Path
) -> None:
    kept.parent.mkdir()
    with pytest.raises(KeyboardInterrupt):
        opened(model, images, kept, stop_at=66)
    first, passed, _ = opened(model, images, kept)
    assert (passed, len(first)) == (COUNT - 66, COUNT), "what has passed before an interrupt is kept"
    again, passed, _ = opened(model, images, kept)
    assert passed == 0
    assert again.names == first.names
    assert np.array_equal(again.features, first.features)
    (images / "001.png").unlink()
    os.utime(images / "003.png", ns=(1, 1))
    Image.new("RGB", (50, 30), "red").save(images / "new.jpg")
    third, passed, _ = opened(model, images, kept)
    assert (passed, len(third)) == (2, COUNT)


def test_what_is_kept_belongs_to_weights_folder_and_user_and_the_oldest_is_removed(
    trained: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = digits(tmp_path / "few", 2)
    other = tmp_path / "weights.pt"
    other.write_bytes(trained.read_bytes())
    kept: list[set[Path]] = []
    for weights_file, folder in ((trained, few), (trained, few), (other, few), (trained, few / "even")):
        assert main(search(weights_file, folder, "--once", "seven")) == 0
        kept.append(set(tmp_path.rglob("*.npz")))
    assert [len(files) for files in kept] == [1, 1, 2, 3]
    for path in kept[-1]:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    (first,), (third,) = kept[0], kept[3] - kept[2]
    for path in kept[-1]:
        os.utime(path, (1, 1))
    assert main(search(trained, few, "--once", "seven")) == 0, "the first is used last"
    monkeypatch.setattr("trainer.search.index.MOST_FILES", 2)
    assert main(search(other, few / "even", "--once", "seven")) == 0
    left = set(tmp_path.rglob("*.npz"))
    assert (len(left), first in left, third in left) == (2, True, False)


@pytest.mark.parametrize("damage", [b"", b"no archive", b"PK half"])
def test_a_damaged_file_of_features_counts_as_none(
    model: SearchModel, tmp_path: Path, kept: Path, damage: bytes
) -> None:
    images = digits(tmp_path / "few", 2)
    kept.parent.mkdir()
    kept.write_bytes(damage)
    assert [opened(model, images, kept)[1] for _ in range(2)] == [2, 0]


def test_a_cache_that_cannot_be_written_is_a_warning(
    model: SearchModel, tmp_path: Path, capsys: Capture
) -> None:
    images = digits(tmp_path / "few", 2)
    (tmp_path / "file").touch()
    assert len(opened(model, images, tmp_path / "file" / "kept.npz")[0]) == 2
    assert "warning: the features are not kept for the next start" in capsys.readouterr().err


def test_bad_pictures_are_named_hidden_ones_left_out_and_links_are_not_followed(
    model: SearchModel, tmp_path: Path
) -> None:
    images = digits(tmp_path / "few", 4)
    (images / "empty.png").touch()
    (images / "text.JPG").write_text("no picture\x1b[31m")
    (images / "cut.png").write_bytes((images / "001.png").read_bytes()[:60])
    Image.new("RGB", (4000, 2)).save(images / "strip.png")
    (images / "notes.txt").write_text("not named: its name is not that of a picture")
    os.mkfifo(images / "pipe.png")
    for name in (".hidden.png", ".git/d.png", "even/.f/g.png"):
        (images / name).parent.mkdir(exist_ok=True)
        (images / name).write_bytes((images / "001.png").read_bytes())
    (images / "link.png").symlink_to(images / "001.png")
    (images / "up").symlink_to(tmp_path)
    found, _, (links, *bad) = opened(model, images, None)
    assert sorted(found.names) == ["001.png", "003.png", "even/000.png", "even/002.png"]
    assert re.fullmatch(r"2 links, (link\.png|up) among them: links are not followed", links)
    names = [re.match(rf"{images}/(\S+): \w", line)[1] for line in bad]  # type: ignore[index]
    assert names == ["cut.png", "empty.png", "pipe.png", "strip.png", "text.JPG"]
    assert "\x1b" not in "".join(bad)


def test_pictures_without_one_that_can_be_used_are_refused(model: SearchModel, tmp_path: Path) -> None:
    (tmp_path / "bad.png").touch()
    with pytest.raises(InputError, match="none of its 1 picture can be used"):
        opened(model, tmp_path, None)


REFUSED = (
    (["--images", "nowhere"], "there is no such folder"),
    (["--images", "empty"], "no picture is in this folder or below it"),
    (["--images", "pictures/001.png"], "is not a folder"),
    (["--images", "pictures", "--once", " "], "--once: the text is empty"),
    (["--images", "pictures", "--model", "ViT-B-33"], "did you mean ViT-B-32"),
    (["--images", "pictures", "--set", "eval.batch=2"], "did you mean eval.batch_size"),
    (["--images", "pictures", "--port", "TAKEN"], "choose another port"),
)
REFUSES = """
import contextlib, io, json, socket, sys
from trainer.cli.main import main
taken = socket.socket()
taken.bind(("127.0.0.1", 0))
taken.listen()
port = str(taken.getsockname()[1])
for words, expected in json.loads(sys.argv[2]):
    words = ["search", sys.argv[1], "--model", sys.argv[3], *words]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert main([port if word == "TAKEN" else word for word in words]) == 2, words
    assert expected in said.getvalue(), said.getvalue()
assert "torch" not in sys.modules
"""


def test_bad_input_is_refused_before_torch_is_imported(trained: Path, images: Path) -> None:
    (images.parent / "empty").mkdir()
    ran = ready("trainer.cli.main", "trainer.config").run(
        REFUSES, str(trained), json.dumps(REFUSED), VIT, folder=images.parent
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_weights_without_a_finite_feature_are_refused(trained: Path, images: Path, tmp_path: Path) -> None:
    state = torch.load(trained, weights_only=True)
    state["visual.proj"].fill_(3e38)  # features beyond all numbers
    torch.save(state, tmp_path / "diverged.pt")
    diverged = search_model(tmp_path / "diverged.pt")
    with pytest.raises(InputError, match=r"are not finite.*choose another checkpoint"):
        opened(diverged, images, None)


@contextmanager
def running(*words: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "trainer.cli", "search", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watch = threading.Timer(200, process.kill)  # so that a search that says nothing fails the test
    watch.start()
    try:
        with ended_on_failure(process) as started:
            yield started
    finally:
        watch.cancel()


def test_only_the_page_listens_and_ctrl_c_ends_it_with_one_line(trained: Path, images: Path) -> None:
    with running(str(trained), "--model", VIT, "--images", str(images)) as process:
        assert process.stdout is not None
        address = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/[\w-]{22}/\n", process.stdout.readline())
        assert address
        listening = [(each.address, each.port) for each in listeners(process.pid)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert listening == [("127.0.0.1", int(address[1]))]
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-3:] == [
        "clipship: open this address in a browser on this machine; Ctrl-C ends the search",
        "",
        "clipship: Ctrl-C: the search has ended",
    ]


# `clipship search --features`: the pictures of shards, found by features that `clipship embed` wrote.

FEW = 20


def digit(number: int) -> Image.Image:
    return Image.fromarray((load_digits().images[number] * 15).astype("uint8")).resize((40, 40))


def png(number: int) -> bytes:
    file = io.BytesIO()
    digit(number).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """Two shards with digits, one of them broken, some with two captions, and their features beside them."""
    samples = [
        (f"{n:02d}", {"png": bytes(20) if n == 5 else png(n), "txt": b"a\nb" if n % 3 else b"a"})
        for n in range(FEW)
    ]
    folder = tmp_path_factory.mktemp("shards")
    embedded(trained, folder, **{"0": samples[::2], "1": samples[1::2]})
    return folder


def test_it_finds_the_samples_that_open_clip_itself_finds_nearest(
    trained: Path, shards: Path, capsys: Capture
) -> None:
    text = "a handwritten seven"
    folder = shards / "features"
    words = ["search", str(trained), "--model", VIT, "--features", str(folder), "--once", text, "--top", "4"]
    assert main(words) == 0
    numbers = [number for number in range(FEW) if number != 5]
    _, order = nearest(trained, [digit(each) for each in numbers], text)
    expected = [f"{shards}/{numbers[each] % 2}.tar/{numbers[each]:02d}" for each in order[:4]]
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == expected


def test_the_page_shows_pictures_out_of_their_shards(trained: Path, shards: Path) -> None:
    index = index_of_features(trained, shards / "features")
    assert len(index) == FEW - 1, "each picture once, and the broken one not at all"
    assert index.folder.decoded(f"{shards}/1.tar/07").tobytes() == digit(7).convert("RGB").tobytes()
    with serving(index) as server:
        status, media, _ = server.answer(f"/{server.token}/picture/3")
        assert (status, media) == (200, "image/png")


def test_features_that_do_not_fit_are_refused(trained: Path, shards: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    other.write_bytes(trained.read_bytes())
    features = ["--features", str(shards / "features")]
    for weights_file, words, said in (
        (other, features, "0.parquet holds features by tiny-vit.json with weights.pt"),
        (trained, ["--features", str(tmp_path)], "no features of a picture are there"),
        (trained, [], "give either --images"),
        (trained, ["--images", str(shards), *features], "give either --images"),
    ):
        assert said in " ".join(
            clipship("search", weights_file, "--model", VIT, *words, "--once", "a", code=2).err.split()
        )


# The page of `clipship search` over real HTTP: who gets an answer, and which pictures are served.

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
