"""Arguments that several commands take, with one meaning and one help text. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trainer.errors import InputError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

job_argument: Decorator = click.argument("job_path", metavar="JOB", type=click.Path(path_type=Path))
set_option: Decorator = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the job file, e.g. optim.lr=1e-3; an empty value takes the default. May be "
    "repeated.",
)


def _caption_key(_context: click.Context, _option: click.Parameter, ending: str) -> str:
    from trainer.config.data import check_caption_key

    try:
        return check_caption_key(ending)
    except ValueError as problem:
        raise InputError(f"--caption-key {problem}") from None


CAPTION_KEY: Decorator = click.option(
    "--caption-key",
    default="txt",
    show_default=True,
    metavar="ENDING",
    callback=_caption_key,
    help="As data.caption_key of the job.",
)
