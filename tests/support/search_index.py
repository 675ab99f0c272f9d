"""Pictures to search in, and a model with real weights, which knows nothing yet."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import open_clip
import torch
from PIL import Image

from tests.support.jobs import VIT, tiny_job
from tests.support.pictures import digit
from tests.support.thread_ranks import run_ranks
from trainer.data.pack import PackedSample, write_shard
from trainer.evaluate.embed import embed
from trainer.model.build import untrained
from trainer.plan.trained import embed_job, search_job
from trainer.search import index as search_index
from trainer.search.features import open_features
from trainer.search.model import SearchModel
from trainer.search.server import Server


def weights(folder: Path) -> Path:
    """Saves weights of the tiny model as open_clip does."""
    path = folder / "weights.pt"
    torch.save(untrained(tiny_job()).model.state_dict(), path)
    return path


def digits(folder: Path, count: int) -> Path:
    """Writes real pictures of digits into the folder and into one below it."""
    for number in range(count):
        path = folder / ("even" if number % 2 == 0 else ".") / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(digit(number, side=40)[0])
    return folder


def search_model(weights: Path) -> SearchModel:
    return SearchModel(search_job(str(weights), VIT, ()))


def opened(
    model: SearchModel, images: Path, kept_in: Path | None, stop_at: int = 0
) -> tuple[search_index.Index, int, list[str]]:
    """Returns the index, the number of pictures that passed the model for it, and what was left out.

    An interrupt comes when so many have passed.
    """
    bad: list[str] = []
    passed: list[int] = []

    def done(count: int, _total: int) -> None:
        if count == stop_at:
            raise KeyboardInterrupt
        passed.append(count)

    pictures = search_index.find_pictures(images, bad.append)
    found = search_index.open_index(
        model, search_index.PictureFolder(images), pictures, kept_in, done, bad.append
    )
    assert passed == list(range(1, len(passed) + 1))
    return found, len(passed), bad


def index_of(model: SearchModel, folder: Path) -> search_index.Index:
    """Returns the index of all pictures in the folder, of which none may be bad."""
    found, _, bad = opened(model, folder, None)
    assert bad == []
    return found


def nearest(weights: Path, pictures: list[Image.Image], text: str) -> tuple[torch.Tensor, list[int]]:
    """Returns the cosines of pictures with a text by open_clip itself, and their order."""
    open_clip.add_model_config(VIT)
    clip, _, transform = open_clip.create_model_and_transforms(Path(VIT).stem, pretrained=str(weights))
    clip.eval()
    with torch.no_grad():
        images = clip.encode_image(torch.stack([transform(each) for each in pictures]), normalize=True)
        wanted = clip.encode_text(open_clip.get_tokenizer(Path(VIT).stem)([text]), normalize=True)[0]
    cosines = images @ wanted
    return cosines, cosines.argsort(descending=True).tolist()


def embedded(weights: Path, folder: Path, **shards: Sequence[PackedSample]) -> Path:
    """Writes shards and the features of their samples; returns the folder of the features."""
    for name, samples in shards.items():
        write_shard(samples, folder / f"{name}.tar")
    job = embed_job(str(weights), VIT, (f"{folder}/*.tar",), 1, ("data.workers=0",))
    run_ranks(1, lambda comm: embed(job, comm, "fp16"))
    return folder / "features"


def index_of_features(weights: Path, features: Path) -> search_index.Index:
    """Returns the index of the pictures that these features are of."""
    job = search_job(str(weights), VIT, ())
    return open_features(SearchModel(job), features, job)


@contextmanager
def serving(index: search_index.Index) -> Iterator[Server]:
    """Yields a server of the index that answers in a thread of its own, on a port that the system chose."""
    with Server(0) as server:
        server.index, server.about = index, "tiny-vit <from> weights.pt"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
