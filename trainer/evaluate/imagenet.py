"""Class names and templates of ImageNet as open_clip evaluates with them: `set:imagenet` in a job.

They are read from the source of the installed package, because importing it would import torch.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path

from trainer.errors import InputError

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
