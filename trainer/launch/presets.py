"""The example job files that `clipship init` writes. Imports neither the model nor torch."""

import os
from pathlib import Path

from trainer.errors import InputError
from trainer.whole_file import write_whole

_FOLDER = Path(__file__).parent.parent / "presets"


def preset_names() -> list[str]:
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def preset_text(name: str) -> str:
    """The commented job file, as it is written."""
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")


def preset_summary(name: str) -> str:
    """The first sentence of its first comment."""
    return preset_text(name).split("\n", 1)[0].removeprefix("# ")


def write_preset(name: str, path: Path, *, force: bool) -> None:
    """Write the preset to `path`, whole or not at all. Raises InputError where a file is there already (unless `force`) or cannot be."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the file to write, for example {path / 'job.toml'}")
    if os.path.lexists(path) and not force:
        raise InputError(f"{path} exists already: give another name, or --force to replace it")
    try:
        write_whole(path, preset_text(name))
    except OSError as problem:
        raise InputError(f"{path} cannot be written: {problem.strerror}") from None
