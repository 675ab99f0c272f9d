"""The example job files that `clipship init` writes. Imports neither the model nor torch."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import InputError
from trainer.run.layout import JOB_FILE
from trainer.safe_io.atomic import write_whole
from trainer.text.terminal import one_line

_FOLDER = Path(__file__).parent
SCHEMA = _FOLDER / "job-schema.json"
"""JSON Schema of a job file, which `make reference` writes. An installed package brings it along."""


def schema_places() -> dict[str, dict[str, Any]]:
    """Returns the places of the schema by dotted keys: "" is the whole, a section comes before its keys."""

    def walk(place: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, inner in place.get("properties", {}).items():
            yield f"{prefix}{name}", inner
            yield from walk(inner, f"{prefix}{name}.")

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return {"": schema, **dict(walk(schema, ""))}


def preset_names() -> list[str]:
    """Returns the names of all presets, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def preset_text(name: str) -> str:
    """Returns the preset's commented job file."""
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def schema_line() -> str:
    """First line of a job file that editors complete: where this installation has the schema.

    An editor elsewhere finds no schema there, and the line is a comment to everything else.
    """
    return f"#:schema {SCHEMA.resolve().as_uri()}\n"


def preset_summary(name: str) -> str:
    """Returns the first line of the preset, a comment that describes it."""
    return preset_text(name).split("\n", 1)[0].removeprefix("# ")


def write_job_file(path: Path, text: str, *, force: bool) -> None:
    """Write a job file to `path`, whole or not at all.

    Raises InputError if a file is there already (unless `force`), or if none can be written.
    """
    check_free(path, force=force, text=text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(os.path.realpath(path)), text)  # a link stays one
    except OSError as problem:
        raise InputError(f"{path} cannot be written: {problem.strerror}") from None


def check_free(path: Path, *, force: bool, text: str = "") -> None:
    """Raises InputError if `path` is a folder, or a file that only `force` may replace.

    It also does if the path, or a line that the file would have, has a name that is not UTF-8.
    """
    for line in (str(path), *text.splitlines()):
        if any("\ud800" <= character <= "\udfff" for character in line):
            raise InputError(
                f"{one_line(line)}: this name is not UTF-8, as all in a job file must be: rename the file or "
                "the folder"
            )
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the file to write, for example {path / JOB_FILE}")
    if os.path.lexists(path) and not force:
        raise InputError(f"{path} exists already: give another name, or --force to replace it")
