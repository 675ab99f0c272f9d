"""Sets of words for zero-shot classification that have a name.

They are templates, `eval.templates = "set:NAME"`, and class names, `eval.class_names = "set:NAME"`. Those of
ImageNet are open_clip's own, read from the source of the package, because importing it would import torch.
"""

import ast
import importlib.util
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
            tree = ast.parse((Path(folder) / _FILE).read_text(encoding="utf-8"))
            found = _assigned(tree)
            return list(ast.literal_eval(found[_NAMES])), [
                _template(part) for part in _parts(found[_TEMPLATES])
            ]
        except (OSError, SyntaxError, ValueError, KeyError):
            break
    raise NotInstalled(
        f"ImageNet's class names and templates stand in {_FILE} of the package open_clip_torch, and this "
        "Python has none that can be read: install it"
    )


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _parts(values: ast.expr) -> list[ast.expr]:
    if not isinstance(values, ast.Tuple | ast.List):
        raise ValueError("expected a list")
    return values.elts


def _template(function: ast.expr) -> str:
    """Returns the sentence that a lambda makes by an f-string, with `{}` for its argument."""
    if not isinstance(function, ast.Lambda) or not isinstance(function.body, ast.JoinedStr):
        raise ValueError("expected a lambda with an f-string")
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "{}" for part in function.body.values
    )
