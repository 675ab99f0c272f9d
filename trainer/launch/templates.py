"""Templates and tables that are no Python: where they lie, and how a template is read. Pure but for reading those files; no torch."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import InputError

if TYPE_CHECKING:
    import jinja2

_CHECKOUT = Path(__file__).parents[2]
_INSTALLED = Path(sys.prefix) / "share" / "clipship"


def folder(name: str) -> Path:
    """The folder `docker`, `slurm` or `k8s`: of the checkout that this code is in, else the one that was installed with it."""
    for base in (_CHECKOUT, _INSTALLED):
        if (base / name).is_dir() and (base / "docker" / "stacks.toml").is_file():
            return base / name
    raise InputError(f"the folder {name}/ is neither beside this code ({_CHECKOUT}) nor in {_INSTALLED}: install clipship anew")


def template(folder_name: str, file_name: str, filters: Mapping[str, Callable[..., str]]) -> "jinja2.Template":
    """The template, strict: an undefined name is an error. Every value in it passes one of the filters, which quote."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder(folder_name)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # a Dockerfile or a shell script, no HTML
    )
    environment.filters.update(filters)
    return environment.get_template(file_name)
