"""The templates of docker/, slurm/ and k8s/, and the filters that every value in them passes.

Imports no torch.
"""

import shlex
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from trainer.sysinfo.template_folder import FOLDER
from trainer.text.yaml_text import yaml, yaml_block

if TYPE_CHECKING:
    from jinja2 import Environment


def render(name: str, **values: Any) -> str:
    """Returns the text of a template such as `slurm/train.sbatch.j2`.

    A value that it uses and does not get is an error.
    """
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
        autoescape=False,  # the texts are no HTML: each value passes one of the filters
    )
    environment.filters |= {
        "sh": sh,
        "sh_words": sh_words,
        "yaml": yaml,
        "yaml_block": yaml_block,
        "indented": indented,
        "directive": directive,
    }
    environment.filters |= {"dockerfile": dockerfile}
    return environment


def sh(value: object) -> str:
    """Returns the value as one word of a POSIX shell.

    A leading = is quoted, because NAME==x reads as a comparison.
    """
    quoted = shlex.quote(str(value))
    return f"'{quoted}'" if quoted.startswith("=") else quoted


def sh_words(values: Iterable[object]) -> str:
    """Returns the values as words of a POSIX shell."""
    return " ".join(map(sh, values))


def indented(text: str, columns: int) -> str:
    """Returns the lines of a text moved to the right."""
    return textwrap.indent(text, " " * columns)


def dockerfile(value: object) -> str:
    """Returns the one-line value of an ENV or a LABEL, with backslashes, quotes and dollars escaped."""
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def directive(value: object) -> str:
    """Returns the value of an option on an #SBATCH line.

    Inside quotes sbatch reads a backslash as a shell does.
    """
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
