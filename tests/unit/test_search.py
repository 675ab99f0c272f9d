"""`clipship search`: which pictures it finds, what it keeps for the next start, and what it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.listeners import listeners
from tests.support.jobs import VIT
from tests.support.processes import ended_on_failure
from tests.support.ready import ready
from tests.support.search_index import digits, opened, search_model, weights
from trainer.cli.main import main
from trainer.errors import InputError
from trainer.search.model import SearchModel

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
