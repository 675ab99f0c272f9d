"""Model names and config files, checked without importing open_clip (which imports torch)."""

import difflib
import importlib.util
import json
import os
from pathlib import Path

from trainer.errors import InputError

_CONFIG_KEYS = ("embed_dim", "vision_cfg", "text_cfg")
_HUB = "hf-hub:"
_FOLDER = "local-dir:"


def known_models() -> list[str]:
    """The names of the configs that open_clip brings, sorted; empty where open_clip is not installed (a login node)."""
    found = importlib.util.find_spec("open_clip")
    folders = [Path(folder) / "model_configs" for folder in found.submodule_search_locations or ()] if found else []
    return sorted(file.stem for folder in folders for file in folder.glob("*.json"))


def check_model(name: str) -> None:
    """Raises InputError for an unknown name (the nearest are named) and for a config file that is missing or incomplete.

    `hf-hub:` names are the hub's to check; without open_clip here, names are left to the ranks.
    """
    if name.startswith(_HUB):
        return
    if name.startswith(_FOLDER):
        _check_folder(Path(name.removeprefix(_FOLDER)))
    elif name.endswith(".json"):
        _check_config(Path(name))
    else:
        _check_known(name)


def check_pretrained(pretrained: str | None) -> None:
    """Raises InputError where it names a weights file (a path) that cannot be read; tags are open_clip's to check."""
    if pretrained and "/" in pretrained and not os.access(pretrained, os.R_OK):
        raise InputError(f"model.pretrained: no weights file that can be read at {pretrained}")


def _check_known(name: str) -> None:
    known = known_models()
    plain = name.replace("/", "-")  # open_clip takes ViT-B/32 for ViT-B-32
    if not known or plain in known:
        return
    by_lower = {model.lower(): model for model in known}
    near = [by_lower[match] for match in difflib.get_close_matches(plain.lower(), list(by_lower), n=3)]
    hint = f"did you mean {', '.join(near)}?" if near else f"open_clip has for example {', '.join(known[:3])}."
    raise InputError(f"model.name: unknown model {name!r}; {hint} A config file is given by its path (.json)")


def _check_folder(folder: Path) -> None:
    if not (folder / "open_clip_config.json").is_file():
        raise InputError(f"model.name: {folder} holds no open_clip_config.json")


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"model.name: no such config file: {path}") from None
    except OSError as problem:
        raise InputError(f"model.name: {path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise InputError(f"model.name: {path} is not JSON: {problem}") from None
    missing = [key for key in _CONFIG_KEYS if key not in config] if isinstance(config, dict) else list(_CONFIG_KEYS)
    if missing:
        raise InputError(f"model.name: {path} lacks {', '.join(missing)}; a model config of open_clip has {', '.join(_CONFIG_KEYS)}")
