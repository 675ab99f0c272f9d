"""`clipship search --features`: the pictures of shards, found by features that `clipship embed` wrote."""

import io
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.jobs import VIT
from tests.support.search_index import serving, weights
from tests.support.thread_ranks import run_ranks
from trainer.cli.main import main
from trainer.data.shard_files import write_shard
from trainer.errors import InputError
from trainer.evaluate.embed import embed
from trainer.plan.trained import embed_job, search_job
from trainer.search.features import open_features
from trainer.search.model import SearchModel

Capture = pytest.CaptureFixture[str]
COUNT = 20


def digit(number: int) -> Image.Image:
    return Image.fromarray((load_digits().images[number] * 15).astype("uint8")).resize((40, 40))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """Two shards with digits, one of them broken, some with two captions, and their features beside them."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(2):
        samples = []
        for number in range(shard, COUNT, 2):
            file = io.BytesIO()
            digit(number).save(file, "png")
            image = bytes(20) if number == 5 else file.getvalue()
            samples.append((f"{number:02d}", {"png": image, "txt": b"a\nb" if number % 3 else b"a"}))
        write_shard(samples, folder / f"{shard}.tar")
    job = embed_job(str(trained), VIT, (f"{folder}/*.tar",), 1, ("data.workers=0",))
    run_ranks(1, lambda comm: embed(job, comm, "fp16"))
    return folder


def test_it_finds_the_samples_that_open_clip_itself_finds_nearest(
    trained: Path, shards: Path, capsys: Capture
) -> None:
    text = "a handwritten seven"
    folder = shards / "features"
    words = ["search", str(trained), "--model", VIT, "--features", str(folder), "--once", text, "--top", "4"]
    assert main(words) == 0
    open_clip.add_model_config(VIT)
    clip, _, transform = open_clip.create_model_and_transforms(Path(VIT).stem, pretrained=str(trained))
    clip.eval()
    numbers = [number for number in range(COUNT) if number != 5]
    with torch.no_grad():
        pictures = clip.encode_image(
            torch.stack([transform(digit(each)) for each in numbers]), normalize=True
        )
        wanted = clip.encode_text(open_clip.get_tokenizer(Path(VIT).stem)([text]), normalize=True)[0]
    nearest = (pictures @ wanted).argsort(descending=True)[:4].tolist()
    expected = [f"{shards}/{numbers[each] % 2}.tar/{numbers[each]:02d}" for each in nearest]
    assert [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()] == expected


def test_the_page_shows_pictures_out_of_their_shards(trained: Path, shards: Path) -> None:
    job = search_job(str(trained), VIT, ())
    index = open_features(SearchModel(job), shards / "features", job)
    assert len(index) == COUNT - 1, "each picture once, and the broken one not at all"
    assert index.folder.decoded(f"{shards}/1.tar/07").tobytes() == digit(7).convert("RGB").tobytes()
    with serving(index) as server:
        status, media, _ = server.answer(f"/{server.token}/picture/3")
        assert (status, media) == (200, "image/png")


def test_each_picture_of_a_key_that_comes_twice_is_found(trained: Path, tmp_path: Path) -> None:
    samples = []
    for key, number in (("a", 1), ("b", 2), ("a", 3)):
        file = io.BytesIO()
        digit(number).save(file, "png")
        samples.append((key, {"png": file.getvalue(), "txt": b"a"}))
    write_shard(samples, tmp_path / "0.tar")
    job = embed_job(str(trained), VIT, (f"{tmp_path}/0.tar",), 1, ("data.workers=0",))
    run_ranks(1, lambda comm: embed(job, comm, "fp16"))
    chosen = search_job(str(trained), VIT, ())
    index = open_features(SearchModel(chosen), tmp_path / "features", chosen)
    names = [f"{tmp_path}/0.tar/{name}" for name in ("a", "b", "a (row 2)")]
    assert (index.names, len(index)) == (names, 3)
    for name, number in zip(names, (1, 2, 3), strict=True):
        assert index.folder.decoded(name).tobytes() == digit(number).convert("RGB").tobytes()


def test_features_of_other_weights_are_refused(trained: Path, shards: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    other.write_bytes(trained.read_bytes())
    job = search_job(str(other), VIT, ())
    with pytest.raises(InputError, match=r"0.parquet holds features by tiny-vit.json with weights.pt"):
        open_features(SearchModel(job), shards / "features", job)
    with pytest.raises(InputError, match="no features of a picture are there"):
        open_features(SearchModel(job), tmp_path, job)


def test_pictures_and_features_exclude_each_other(trained: Path, shards: Path, capsys: Capture) -> None:
    both = ["--images", str(shards), "--features", str(shards / "features")]
    for words in ([], both):
        assert main(["search", str(trained), "--model", VIT, *words]) == 2
        assert "give either --images" in capsys.readouterr().err
