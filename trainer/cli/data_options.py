"""Options of commands that read samples. They name data as `[data]` does in a job file. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.config import Data

DataOf = Callable[[Sequence[str]], "Data"]
"""Function from files to the section `[data]` that names them, with the values of a command's options."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "image_key": {"multiple": True, "metavar": "ENDING"},
    "caption_key": {"multiple": True, "metavar": "KEY", "help": "[default: txt]"},
    "caption_lines": {"metavar": "several|one", "help": "[default: several]"},
    "caption_template": {"multiple": True, "metavar": "TEXT"},
    "empty_captions": {
        "multiple": True,
        "metavar": "TEXT",
        "help": "[default: nan, None, null and their like]",
    },
    "filters": {"multiple": True, "metavar": "FILTER"},
    "scores": {"multiple": True, "metavar": "FILE"},
    "scores_by": {"metavar": "NAME", "help": "[default: key]"},
    "group_by": {"metavar": "NAME"},
    "image_column": {"metavar": "NAME", "help": "[default: image]"},
    "caption_column": {"multiple": True, "metavar": "NAME", "help": "[default: caption]"},
    "separator": {"metavar": "CHARACTER", "help": "[default: a comma for .csv, a tab for .tsv]"},
    "quotes": {"metavar": "cells|text", "help": "[default: cells]"},
    "encoding": {"metavar": "NAME", "help": "[default: utf-8]"},
}
"""Settings of click for an option, by the key of `[data]` that it stands for."""


def data_options(*keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds options for the keys, and gives the command `data`, from them.

    `data` is a function from the files to the `Data`, which raises InputError for a value that no job may
    have.
    """

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_data(**arguments: Any) -> Any:
            given = {key: arguments.pop(key) for key in keys}
            return command(**arguments, data=lambda files: _data(files, given))

        result: Callable[..., Any] = with_data
        for key in reversed(keys):
            result = _option(key)(result)
        return result

    return decorated


def _option(key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    settings = _OPTIONS[key]
    again = " May be repeated." if settings.get("multiple") else ""
    words = f"As data.{key} in a job file.{again} {settings.get('help', '')}".strip()
    return click.option(f"--{key.replace('_', '-')}", **{**settings, "help": words})


def _data(files: Sequence[str], given: Mapping[str, Any]) -> "Data":
    from pydantic import ValidationError

    from trainer.config import Data
    from trainer.config.messages import problem_texts
    from trainer.config.types import Section

    class Options(Section):
        """The values of the options, where a job file would have them."""

        data: Data

    values = {key: value for key, value in given.items() if value}
    if "encoding" in values:
        values["encoding"] = values["encoding"].lower()
    try:
        return Options.model_validate({"data": {**values, "train": tuple(files)}}).data
    except ValidationError as error:
        raise InputError("\n".join(_named(key, text) for key, text in problem_texts(error))) from None


def _named(key: Sequence[str], text: str) -> str:
    option = f"--{key[-1].replace('_', '-')}: " if key and key[-1] in _OPTIONS else ""
    return f"{option}{text}"
