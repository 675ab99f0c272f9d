"""`clipship search --features`: the pictures of shards, found by features that `clipship embed` wrote."""

import io
from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.jobs import VIT
from tests.support.search_index import embedded, index_of_features, nearest, serving, weights
from trainer.cli.main import main

Capture = pytest.CaptureFixture[str]
COUNT = 20


def digit(number: int) -> Image.Image:
    return Image.fromarray((load_digits().images[number] * 15).astype("uint8")).resize((40, 40))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("weights"))


def png(number: int) -> bytes:
    file = io.BytesIO()
    digit(number).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """Two shards with digits, one of them broken, some with two captions, and their features beside them."""
    samples = [
        (f"{n:02d}", {"png": bytes(20) if n == 5 else png(n), "txt": b"a\nb" if n % 3 else b"a"})
        for n in range(COUNT)
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
    numbers = [number for number in range(COUNT) if number != 5]
    _, order = nearest(trained, [digit(each) for each in numbers], text)
    expected = [f"{shards}/{numbers[each] % 2}.tar/{numbers[each]:02d}" for each in order[:4]]
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == expected


def test_the_page_shows_pictures_out_of_their_shards(trained: Path, shards: Path) -> None:
    index = index_of_features(trained, shards / "features")
    assert len(index) == COUNT - 1, "each picture once, and the broken one not at all"
    assert index.folder.decoded(f"{shards}/1.tar/07").tobytes() == digit(7).convert("RGB").tobytes()
    with serving(index) as server:
        status, media, _ = server.answer(f"/{server.token}/picture/3")
        assert (status, media) == (200, "image/png")


def test_features_that_do_not_fit_are_refused(
    trained: Path, shards: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "other.pt"
    other.write_bytes(trained.read_bytes())
    features = ["--features", str(shards / "features")]
    for weights_file, words, said in (
        (other, features, "0.parquet holds features by tiny-vit.json with weights.pt"),
        (trained, ["--features", str(tmp_path)], "no features of a picture are there"),
        (trained, [], "give either --images"),
        (trained, ["--images", str(shards), *features], "give either --images"),
    ):
        assert main(["search", str(weights_file), "--model", VIT, *words, "--once", "a"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
