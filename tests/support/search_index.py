"""Pictures to search in, and a model with real weights, which knows nothing yet."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.jobs import VIT, tiny_job
from trainer.model.build import untrained
from trainer.plan.trained import search_job
from trainer.search.cache import PictureFolder
from trainer.search.index import Index, open_index
from trainer.search.model import SearchModel
from trainer.search.pictures import find_pictures
from trainer.search.server import Server


def weights(folder: Path) -> Path:
    """Saves weights of the tiny model as open_clip does."""
    path = folder / "weights.pt"
    torch.save(untrained(tiny_job()).model.state_dict(), path)
    return path


def digits(folder: Path, count: int) -> Path:
    """Writes real pictures of digits into the folder and into one below it."""
    images = load_digits().images
    for number in range(count):
        path = folder / ("even" if number % 2 == 0 else ".") / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((images[number] * 15).astype("uint8")).resize((40, 40)).save(path)
    return folder


def search_model(weights: Path) -> SearchModel:
    return SearchModel(search_job(str(weights), VIT, ()))


def index_of(model: SearchModel, folder: Path) -> Index:
    """Returns the index of all pictures in the folder, of which none may be bad."""
    bad: list[str] = []
    found = open_index(
        model, PictureFolder(folder), find_pictures(folder, bad.append), None, lambda *_: None, bad.append
    )
    assert bad == []
    return found


@contextmanager
def serving(index: Index) -> Iterator[Server]:
    """Yields a server of the index that answers in a thread of its own, on a port that the system chose."""
    with Server(0) as server:
        server.index, server.about = index, "tiny-vit <from> weights.pt"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
