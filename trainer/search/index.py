"""The pictures of a folder with their features, and the nearest ones to a text. Imports no torch itself.

Features are kept between starts in the user's cache folder, in a file for each model and folder. It has a row
for each picture, by name, size and time of change, so that only new and changed pictures pass the model
again. A file that cannot be read counts as none. Pictures are read within limits for files from strangers.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.config import Job
from trainer.data.files import read_file
from trainer.data.pictures import AS_SHOWN, Decoding, decode
from trainer.data.sample import MOST_BYTES, RawSample, check_file
from trainer.errors import InputError
from trainer.run.model_identity import model_identity
from trainer.safe_io.atomic import replacing
from trainer.safe_io.plain import parse_json
from trainer.sysinfo.user_cache import user_cache
from trainer.text.terminal import one_line, say
from trainer.text.wording import many

if TYPE_CHECKING:
    from PIL import Image


ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".jp2"),
)
"""Endings of the names of picture files, in the formats that `trainer.data.pictures` decodes."""
FORMAT = 2
"""Number that changes with the way in which features are computed or kept."""
MOST_FILES = 32
"""Files that the folder keeps; those that were used longest ago are removed."""


@dataclass(frozen=True)
class Picture:
    """A picture file as it was when the folder was listed; a changed file is another picture."""

    name: str
    """Path below the folder."""
    size: int
    """Bytes of the file."""
    changed_ns: int
    """Time of the last change, in nanoseconds since 1970."""


def find_pictures(folder: Path, left_out: Callable[[str], object]) -> list[Picture]:
    """Returns the picture files below the folder, by path.

    Hidden files and folders are left out. So are links, because what they name may lie elsewhere. `left_out`
    gets a sentence for what cannot be read. Raises InputError if there is no folder, or no picture in it.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "there is no such folder"
        raise InputError(f"--images {folder}: {what}: give the folder that holds the pictures")
    links: list[str] = []
    pictures = sorted(_walk(folder, "", links, left_out), key=lambda picture: picture.name)
    if links and pictures:
        left_out(f"{many(len(links), 'link')}, {links[0]} among them: links are not followed")
    if not pictures:
        hint = f", and its {many(len(links), 'link')} are not followed" if links else ""
        raise InputError(
            f"--images {folder}: no picture is in this folder or below it{hint}; the names of pictures end "
            f"in {', '.join(ENDINGS)}"
        )
    return pictures


def _walk(root: Path, inside: str, links: list[str], left_out: Callable[[str], object]) -> Iterator[Picture]:
    try:
        entries = list(os.scandir(root / inside))
    except OSError as problem:
        left_out(f"{one_line(str(root / inside))}: cannot be read: {problem.strerror}")
        return
    for entry in entries:
        name = os.path.join(inside, entry.name)
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, name, links, left_out)
        elif entry.is_symlink():
            if entry.name.lower().endswith(ENDINGS) or entry.is_dir():
                links.append(one_line(name))
        elif entry.name.lower().endswith(ENDINGS):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as problem:  # removed meanwhile
                left_out(f"{one_line(str(root / name))}: cannot be read: {problem.strerror}")
                continue
            yield Picture(name, status.st_size, status.st_mtime_ns)


Features = NDArray[np.float32]
"""Unit vectors [n, D]; of one picture, [D]."""


def cache_file(job: Job, images: Path) -> Path | None:
    """Returns the file for the features of this folder by this job's model.

    Returns None if the user has no cache folder.
    """
    folder = user_cache("search")
    if folder is None:
        return None
    identity = [FORMAT, *model_identity(job), os.fsencode(images.resolve()).hex()]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    return folder / f"{name}.npz"


def _read(path: Path | None) -> dict[Picture, Features]:
    """Returns the features of each picture that the file has."""
    if path is None:
        return {}
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
            rows = parse_json(content["pictures"].tobytes())
            features = content["features"]
        if features.dtype != np.float32 or features.shape[:1] != (len(rows),) or features.ndim != 2:
            return {}
        known = {Picture(*row): vector for row, vector in zip(rows, features, strict=True)}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return {}
    with suppress(OSError):
        os.utime(path)  # it was used last
    return known


def _write(path: Path, features: Mapping[Picture, Features]) -> None:
    """Replaces the file, whole or not at all; nobody else may read it. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows = [[picture.name, picture.size, picture.changed_ns] for picture in features]
    names = np.frombuffer(json.dumps(rows).encode(), dtype=np.uint8)
    with replacing(path, mode=0o600) as file:
        np.savez(file, pictures=names, features=np.stack(list(features.values())))
    kept = sorted(path.parent.glob("*.npz"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in kept[MOST_FILES:]:
        old.unlink(missing_ok=True)


@dataclass(frozen=True)
class PictureFolder:
    """A folder with the limits of its pictures."""

    path: Path
    most_bytes: int = MOST_BYTES
    """Largest picture file."""
    decoding: Decoding = AS_SHOWN

    def place(self, name: str) -> str:
        """Returns the path of the picture at this path below the folder."""
        return str(self.path / name)

    def decoded(self, name: str) -> "Image.Image":
        """Returns the picture at this path below the folder, in RGB. Raises InputError, such as BadSample."""
        key, origin = one_line(name), str(self.path)
        content = read_file(
            self.path / name, key, lambda status: check_file(origin, key, status, self.most_bytes), ()
        )
        return decode(RawSample(key, origin, content, ()), self.decoding)


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
    """Protocol of where the pictures lie; `PictureFolder` implements it."""

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
    known = _read(kept_in)
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
        _write(path, features)
    except OSError as problem:
        say(f"warning: the features are not kept for the next start: {path}: {problem.strerror}")
