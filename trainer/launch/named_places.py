"""Tells where the files of a job's patterns lie, without looking at any. Imports no torch."""

import glob
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from trainer.config.keys import JobPath
from trainer.data.shard_names import braces
from trainer.errors import InputError

_LITERAL = re.compile(r"\[([*?[])\]")
"""Character that a pattern's brackets make one like others."""


def named_places(text: str, mark: JobPath) -> list[str]:
    """Returns the paths that a key's text names, each once; a glob ends with its first part that is one."""
    if mark.kind != "patterns":
        return [text]
    folder, _, name = text.rpartition("/")
    whole = folder.count("{") == folder.count("}")  # the names in one folder are one place
    try:
        names = [f"{each}/{name}" for each in braces(folder)] if whole else braces(text)
    except InputError:  # a file may have such a name
        names = [text]
    return list(dict.fromkeys(map(_until_a_glob, names)))


def folder_of(place: str, mark: JobPath) -> str:
    """Returns the folder that must be seen for one of the `named_places`."""
    return place if mark.kind == "folder" else str(PurePosixPath(place).parent)


def _until_a_glob(name: str) -> str:
    return "/".join(_parts(name))


def _parts(name: str) -> Iterator[str]:
    for part in name.split("/"):
        yield _LITERAL.sub(r"\1", part)
        if glob.has_magic(_LITERAL.sub("", part)):
            return
