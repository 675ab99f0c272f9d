"""`clipship search`: which pictures it finds, what it keeps for the next start, and what it refuses."""

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
import open_clip
import pytest
import torch
from PIL import Image

from tests.listeners import listeners
from tests.support.jobs import VIT
from tests.support.processes import ended_on_failure
from tests.support.ready import ready
from tests.support.search_index import digits, search_model, weights
from trainer.cli.main import main
from trainer.errors import InputError
from trainer.plan.trained import search_job
from trainer.search import cache
from trainer.search.cache import PictureFolder
from trainer.search.index import Index, open_index
from trainer.search.model import SearchModel
from trainer.search.pictures import Picture, find_pictures

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


def opened(model: SearchModel, images: Path, kept_in: Path | None) -> tuple[Index, int, list[str]]:
    """Returns the index, the number of pictures that passed the model for it, and what was left out."""
    bad: list[str] = []
    passed: list[int] = []
    found = open_index(
        model,
        PictureFolder(images),
        find_pictures(images, bad.append),
        kept_in,
        lambda count, _: passed.append(count),
        bad.append,
    )
    assert passed == list(range(1, len(passed) + 1))
    return found, len(passed), bad


def kept_for(trained: Path, images: Path) -> Path:
    path = cache.cache_file(search_job(str(trained), VIT, ()), images)
    assert path is not None
    return path


def test_it_prints_the_pictures_that_open_clip_itself_finds_nearest(
    trained: Path, images: Path, capsys: Capture
) -> None:
    text = "a handwritten Seven & more"
    words = ["search", str(trained), "--model", VIT, "--images", str(images), "--once", text, "--top", "5"]
    assert main(words) == 0
    printed = capsys.readouterr()
    open_clip.add_model_config(VIT)
    clip, _, transform = open_clip.create_model_and_transforms(Path(VIT).stem, pretrained=str(trained))
    clip.eval()
    paths = sorted(images.rglob("*.png"))
    with torch.no_grad():
        pictures = clip.encode_image(
            torch.stack([transform(Image.open(path)) for path in paths]), normalize=True
        )
        wanted = clip.encode_text(open_clip.get_tokenizer(Path(VIT).stem)([text]), normalize=True)[0]
    cosines = pictures @ wanted
    nearest = cosines.argsort(descending=True)[:5].tolist()
    assert printed.out.splitlines() == [f"{cosines[each]:.3f}  {paths[each]}" for each in nearest]
    assert printed.err.splitlines() == [
        f"clipship: 70 pictures in {images}; loading tiny-vit from {trained.parent.name}/weights.pt"
    ]


def test_a_second_start_embeds_only_new_and_changed_pictures(
    trained: Path, model: SearchModel, images: Path
) -> None:
    kept = kept_for(trained, images)
    first, passed, _ = opened(model, images, kept)
    assert (passed, len(first)) == (COUNT, COUNT)
    again, passed, _ = opened(model, images, kept)
    assert passed == 0
    assert again.names == first.names
    assert np.array_equal(again.features, first.features)
    (images / "001.png").unlink()
    os.utime(images / "003.png", ns=(1, 1))
    Image.new("RGB", (50, 30), "red").save(images / "new.jpg")
    third, passed, _ = opened(model, images, kept)
    assert (passed, len(third)) == (2, COUNT)
    assert opened(model, images, kept)[1] == 0


def test_what_is_kept_belongs_to_weights_folder_and_user(
    trained: Path, model: SearchModel, images: Path, tmp_path: Path
) -> None:
    kept = kept_for(trained, images)
    opened(model, images, kept)
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.rglob("*.npz")) == [kept]
    assert kept_for(trained, images.parent) != kept
    other = tmp_path / "weights.pt"
    other.write_bytes(trained.read_bytes())
    assert kept_for(other, images) != kept


@pytest.mark.parametrize("damage", ["", "no archive", "half"])
def test_a_damaged_file_of_features_counts_as_none(
    trained: Path, model: SearchModel, images: Path, damage: str
) -> None:
    kept = kept_for(trained, images)
    opened(model, images, kept)
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2] if damage == "half" else damage.encode())
    assert opened(model, images, kept)[1] == COUNT
    assert opened(model, images, kept)[1] == 0


def test_an_interrupt_keeps_what_has_passed_the_model(
    trained: Path, model: SearchModel, images: Path
) -> None:
    kept = kept_for(trained, images)

    def interrupt(count: int, _total: int) -> None:
        if count == 66:
            raise KeyboardInterrupt

    pictures = find_pictures(images, print)
    with pytest.raises(KeyboardInterrupt):
        open_index(model, PictureFolder(images), pictures, kept, interrupt, print)
    assert opened(model, images, kept)[1] == COUNT - 66


def test_a_cache_that_cannot_be_written_is_a_warning(
    model: SearchModel, images: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").touch()
    found, _, _ = opened(model, images, tmp_path / "file" / "kept.npz")
    assert len(found) == COUNT
    assert "warning: the features are not kept for the next start" in capsys.readouterr().err


def test_old_files_of_features_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 2)
    rows = {Picture("a.png", 1, 1): np.ones(4, np.float32)}
    for number in range(4):
        path = tmp_path / f"{number}.npz"
        cache.write(path, rows)
        os.utime(path, (number, number))
    assert cache.read(tmp_path / "2.npz").keys() == rows.keys()  # used last
    cache.write(tmp_path / "4.npz", rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.npz", "4.npz"]


def test_bad_pictures_are_named_and_left_out(model: SearchModel, images: Path) -> None:
    (images / "empty.png").touch()
    (images / "text.JPG").write_text("no picture\x1b[31m")
    (images / "cut.png").write_bytes((images / "001.png").read_bytes()[:60])
    Image.new("RGB", (4000, 2)).save(images / "strip.png")
    (images / "notes.txt").write_text("not named: its name is not that of a picture")
    os.mkfifo(images / "pipe.png")
    found, _, bad = opened(model, images, None)
    assert len(found) == COUNT
    assert [re.match(rf"{images}/(\S+): \w", line)[1] for line in bad] == [  # type: ignore[index]
        "cut.png",
        "empty.png",
        "pipe.png",
        "strip.png",
        "text.JPG",
    ]
    assert "\x1b" not in "".join(bad)


def test_pictures_without_one_that_can_be_used_are_refused(model: SearchModel, tmp_path: Path) -> None:
    (tmp_path / "bad.png").touch()
    with pytest.raises(InputError, match="none of its 1 picture can be used"):
        opened(model, tmp_path, None)


def test_hidden_files_are_left_out_and_links_are_not_followed(tmp_path: Path) -> None:
    for name in ("a.png", "b/c.JPEG", ".hidden.png", ".git/d.png", "e.txt", "b/.f/g.png"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("12345")
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "up").symlink_to(tmp_path)
    left_out: list[str] = []
    found = find_pictures(tmp_path / "in", left_out.append)
    assert [(each.name, each.size) for each in found] == [("a.png", 5), ("b/c.JPEG", 5)]
    (line,) = left_out
    assert re.fullmatch(r"2 links, (link\.png|up) among them: links are not followed", line)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--images", "nowhere"], "there is no such folder"),
        (["--images", "empty"], "no picture is in this folder or below it"),
        (["--images", "pictures/001.png"], "is not a folder"),
        (["--images", "pictures", "--once", " "], "--once: the text is empty"),
        (["--images", "pictures", "--model", "ViT-B-33"], "did you mean ViT-B-32"),
        (["--images", "pictures", "--set", "eval.batch=2"], "did you mean eval.batch_size"),
        (["--images", "pictures", "--port", "TAKEN"], "choose another port"),
    ],
)
def test_bad_input_is_refused_before_torch_is_imported(
    trained: Path, images: Path, words: list[str], expected: str
) -> None:
    (images.parent / "empty").mkdir()
    program = (
        "import socket, sys; from trainer.cli.main import main; taken = socket.socket(); "
        "taken.bind(('127.0.0.1', 0)); taken.listen(); port = str(taken.getsockname()[1]); "
        "code = main([port if word == 'TAKEN' else word for word in sys.argv[1:]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ran = ready("trainer.cli.main", "trainer.config").run(
        program, "search", str(trained), "--model", VIT, *words, folder=images.parent
    )
    assert ran.returncode == 2, ran.stderr
    assert expected in ran.stderr
    assert ran.stdout == ""


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
