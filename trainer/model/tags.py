"""Tags of weights that open_clip knows, read from its source without importing it (it imports torch)."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

_TABLE = "_PRETRAINED"
_SAME_TAGS = "-quickgelu"
"""Ending of models that have some of the tags of the model without it."""


def known_tags(model: str) -> list[str]:
    """Returns the model's tags, sorted.

    Empty if open_clip is not installed, lists none for the model, or stores them in another form than it did.
    """
    return sorted(_tags_of(model))


def tag_repository(model: str, tag: str) -> str | None:
    """Returns the repository on the Hugging Face hub that has a tag's weights; None if none is known."""
    return _tags_of(model).get(clean_tag(tag))


def has_tags() -> bool:
    """Returns whether tags can be read here: open_clip is installed and stores them as it did."""
    return any(_tables().values())


def clean_tag(tag: str) -> str:
    """Returns a tag in the form in which open_clip looks it up."""
    return tag.lower().replace("-", "_")


def _tags_of(model: str) -> dict[str, str | None]:
    tags = _tables()
    return tags.get(model) or tags.get(model.removesuffix(_SAME_TAGS)) or {}


@cache
def _tables() -> dict[str, dict[str, str | None]]:
    """Returns the tags of each model, each with the repository that has its weights."""
    spec = importlib.util.find_spec("open_clip")
    files = (
        [Path(folder) / "pretrained.py" for folder in spec.submodule_search_locations or ()] if spec else []
    )
    try:
        return _read(ast.parse(files[0].read_text(encoding="utf-8"))) if files else {}
    except (OSError, ValueError, SyntaxError):
        return {}


def _read(source: ast.Module) -> dict[str, dict[str, str | None]]:
    """Reads `_NAME = dict(tag=..., ...)` and `_PRETRAINED = {"model": _NAME or dict(...), ...}`.

    Other forms are left out.
    """
    named: dict[str, dict[str, str | None]] = {}
    for line in source.body:
        if not (isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)):
            continue
        if line.targets[0].id == _TABLE and isinstance(line.value, ast.Dict):
            pairs = zip(line.value.keys, line.value.values, strict=True)
            return {
                str(key.value): _tags(value, named) for key, value in pairs if isinstance(key, ast.Constant)
            }
        named[line.targets[0].id] = _tags(line.value, named)
    return {}


def _tags(value: ast.expr, named: dict[str, dict[str, str | None]]) -> dict[str, str | None]:
    if isinstance(value, ast.Name):
        return named.get(value.id, {})
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "dict"
        and not value.args
    ):
        tags = {keyword.arg: _repository(keyword.value) for keyword in value.keywords}
        return (
            {tag: where for tag, where in tags.items() if tag} if None not in tags else {}
        )  # None: **others
    return {}


def _repository(value: ast.expr) -> str | None:
    """Reads `hf_hub="OWNER/NAME/FILE"` of a call."""
    for keyword in value.keywords if isinstance(value, ast.Call) else ():
        if keyword.arg == "hf_hub" and isinstance(keyword.value, ast.Constant):
            return "/".join(str(keyword.value.value).split("/")[:2]) or None
    return None
