"""Arguments that several commands take, with one meaning and one help text. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

job_argument: Decorator = click.argument("job_path", metavar="JOB", type=click.Path(path_type=Path))
set_option: Decorator = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the job file, e.g. optim.lr=1e-3; an empty value takes the default. May be repeated.",
)
