"""Keeps the features of pictures between starts, in the user's cache folder. Imports no torch.

There is a file for each model and folder. It has a row for each picture, by name, size and time of change, so
that only new and changed pictures pass the model again. A file that cannot be read counts as none.
Pictures are read within limits for files from strangers.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.config import Job
from trainer.data.files import read_file
from trainer.data.pictures import AS_SHOWN, Decoding, decode
from trainer.data.sample import MOST_BYTES, RawSample, check_file
from trainer.run.model_identity import model_identity
from trainer.safe_io.atomic import replacing
from trainer.safe_io.plain import parse_json
from trainer.search.pictures import Picture
from trainer.sysinfo.user_cache import user_cache
from trainer.text.terminal import one_line

if TYPE_CHECKING:
    from PIL import Image

Features = NDArray[np.float32]
"""Unit vectors [n, D]; of one picture, [D]."""
FORMAT = 2
"""Number that changes with the way in which features are computed or kept."""
MOST_FILES = 32
"""Files that the folder keeps; those that were used longest ago are removed."""


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


def read(path: Path | None) -> dict[Picture, Features]:
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


def write(path: Path, features: Mapping[Picture, Features]) -> None:
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
