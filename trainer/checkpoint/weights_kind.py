"""Tells from the first bytes of a file of weights that it is none, and what it is. Imports no torch."""

import os
import zipfile
from pathlib import Path

from trainer.errors import InputError

_LFS = b"version https://git-lfs"


def check_kind(path: Path) -> None:
    """Raises InputError for a pointer of Git LFS and for TorchScript."""
    if not os.path.isfile(path):
        return
    try:
        with path.open("rb") as file:
            beginning = file.read(len(_LFS))
        script = zipfile.is_zipfile(path) and _is_script(path)
    except (OSError, zipfile.BadZipFile):
        return
    if beginning == _LFS:
        raise InputError(
            f"{path} is a pointer of Git LFS, and not the weights: fetch them with `git lfs pull` in the "
            "repository that it came from"
        )
    if script:
        raise InputError(
            f"{path} is a TorchScript archive, a program as OpenAI released its models, which Clipship never "
            'runs: for those models set model.pretrained = "openai"; for others, write the state_dict of the '
            "model into a file where it was made"
        )


def _is_script(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name for name in archive.namelist())
