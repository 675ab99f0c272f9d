"""The templates of docker/, slurm/ and k8s/, and the filters that every value in them passes. Imports no torch.

`trainer/templates/` links to those folders, so that an installed package carries them too.
"""

import shlex
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.launch.yaml_text import yaml, yaml_block

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent.parent / "templates"


def render(name: str, **values: Any) -> str:
    """The text of a template such as `slurm/train.sbatch.j2`; a value that it names and nobody gave is an error."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> "Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # this is no HTML: each value passes one of the filters
    )
    environment.filters |= {"sh": sh, "sh_words": sh_words, "yaml": yaml, "yaml_block": yaml_block, "directive": directive}
    environment.filters |= {"dockerfile": dockerfile}
    return environment


def sh(value: object) -> str:
    """One word of a POSIX shell, whatever is in it."""
    return shlex.quote(str(value))


def sh_words(values: Iterable[object]) -> str:
    """Words of a POSIX shell, whatever is in them."""
    return " ".join(map(sh, values))


def dockerfile(value: object) -> str:
    """The value of an ENV or a LABEL, of one line: its backslashes, quotes and dollars stay what they are."""
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def directive(value: object) -> str:
    """The value of an option on an #SBATCH line. Inside of its quotes sbatch takes a backslash as a shell does."""
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
