"""The pictures of a folder with their features, and the nearest ones to a text. Imports no torch itself."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from trainer.errors import InputError
from trainer.search import cache
from trainer.search.cache import Features, PictureFolder
from trainer.search.pictures import Picture
from trainer.text.terminal import one_line, say
from trainer.text.wording import many

if TYPE_CHECKING:
    from PIL import Image

Embedded = tuple[Picture, Features | str]
"""A picture with its features, or with the sentence that says why it has none."""


class Model(Protocol):
    """Protocol of what makes the features; `trainer.search.model.SearchModel` implements it."""

    def features_of_text(self, text: str) -> Features:
        """Returns the text's unit vector [D]. Any thread may call it."""

    def features_of_pictures(
        self, folder: PictureFolder, pictures: Sequence[Picture]
    ) -> Generator[Embedded, None, None]:
        """Yields each picture below the folder with its features, in order.

        Raises InputError if features are not finite.
        """


class Pictures(Protocol):
    """Protocol of where the pictures lie; `trainer.search.cache.PictureFolder` implements it."""

    @property
    def path(self) -> Path:
        """The folder, whose name the page shows."""

    def place(self, name: str) -> str:
        """Returns where the picture of this name lies, for people."""

    def decoded(self, name: str) -> "Image.Image":
        """Returns the picture in RGB. Raises InputError."""


class Match(NamedTuple):
    """A picture that was found."""

    number: int
    """Place of the picture in the index, from 0."""
    name: str
    """Path of the picture below the folder."""
    similarity: float
    """Cosine of the angle between the features of text and picture, from -1 to 1."""


@dataclass(frozen=True)
class Index:
    """Pictures that the model could read."""

    folder: Pictures
    names: Sequence[str]
    """Names of the pictures, such as paths below the folder."""
    features: Features
    """Unit vectors [pictures, D]."""
    model: Model

    def __len__(self) -> int:
        return len(self.names)

    def nearest(self, text: str, count: int) -> list[Match]:
        """Returns the pictures nearest to the text, nearest first; of equal ones the first by path."""
        similarity = self.features @ self.model.features_of_text(text)
        order = np.argsort(-similarity, kind="stable")[:count]
        return [Match(int(each), self.names[each], float(similarity[each])) for each in order]


def open_index(
    model: Model,
    folder: PictureFolder,
    pictures: Sequence[Picture],
    kept_in: Path | None,
    done: Callable[[int, int], object],
    left_out: Callable[[str], object],
) -> Index:
    """Returns the index of these pictures.

    Those whose features are in the file `kept_in` do not pass the model. The file is written again, also
    after an interrupt. `done` gets the number of new pictures so far and of
    all new ones, `left_out` a sentence for each picture that cannot be used. Raises InputError if none can.
    """
    known = cache.read(kept_in)
    new = [picture for picture in pictures if picture not in known]
    features = {picture: known[picture] for picture in pictures if picture in known}
    before = len(features)
    try:
        with closing(model.features_of_pictures(folder, new)) as embedded:
            for count, (picture, found) in enumerate(embedded, start=1):
                if isinstance(found, str):
                    left_out(f"{one_line(str(folder.path / picture.name))}: {found}")
                else:
                    features[picture] = found
                done(count, len(new))
    finally:
        if len(features) > before and kept_in is not None:
            _keep(kept_in, features)
    if not features:
        raise InputError(f"--images {folder.path}: none of its {many(len(pictures), 'picture')} can be used")
    usable = [picture for picture in pictures if picture in features]
    return Index(folder, [each.name for each in usable], np.stack([features[each] for each in usable]), model)


def _keep(path: Path, features: Mapping[Picture, Features]) -> None:
    try:
        cache.write(path, features)
    except OSError as problem:
        say(f"warning: the features are not kept for the next start: {path}: {problem.strerror}")
