"""Sets of words for zero-shot classification that have a name.

They are templates, `eval.templates = "set:NAME"`, and class names, `eval.class_names = "set:NAME"`. Those of
ImageNet are open_clip's own. Only the module that has them is run, because importing it would import torch.
"""

import importlib.util
import runpy
from functools import cache
from pathlib import Path

from trainer.errors import InputError
from trainer.sysinfo.own_table import own_table

IMAGENET = "imagenet"
"""Name of the sets that are open_clip's own words for ImageNet's 1,000 classes."""


def template_set(name: str) -> tuple[str, ...]:
    """Returns the templates of a set. Raises InputError for an unknown name."""
    if name == IMAGENET:
        return tuple(imagenet_words()[1])
    sets = own_table(__file__, "template_sets.toml")
    if name not in sets:
        raise _unknown("eval.templates", name, [*sets, IMAGENET])
    return tuple(sets[name])


def class_name_set(name: str) -> tuple[str, ...]:
    """Returns the class names of a set, by class number. Raises InputError for an unknown name."""
    if name != IMAGENET:
        raise _unknown("eval.class_names", name, [IMAGENET])
    return tuple(imagenet_words()[0])


def _unknown(key: str, name: str, known: list[str]) -> InputError:
    return InputError(f'{key}: there is no set called "{name}"; there are {", ".join(sorted(known))}')


_FILE = "zero_shot_metadata.py"
_NAMES, _TEMPLATES = "IMAGENET_CLASSNAMES", "OPENAI_IMAGENET_TEMPLATES"


class NotInstalled(InputError):
    """Raised where open_clip is not installed, as on a login node that only submits."""


@cache
def imagenet_words() -> tuple[list[str], list[str]]:
    """Returns the class names by class number, and the templates with `{}` for the name.

    Raises NotInstalled if open_clip is not installed here or keeps them elsewhere.
    """
    package = importlib.util.find_spec("open_clip")
    for folder in (package.submodule_search_locations or ()) if package else ():
        try:
            found = runpy.run_path(str(Path(folder) / _FILE))
            return list(found[_NAMES]), [str(template("{}")) for template in found[_TEMPLATES]]
        except (OSError, SyntaxError, ImportError, KeyError, TypeError):
            break
    raise NotInstalled(
        f"ImageNet's class names and templates stand in {_FILE} of the package open_clip_torch, and this "
        "Python has none that can be read: install it"
    )
