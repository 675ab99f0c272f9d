"""Checks model names and config files without importing open_clip (which imports torch)."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize

from trainer.checkpoint.weights_kind import check_kind
from trainer.config import Model
from trainer.config.hubs import hub_of
from trainer.config.training import is_weights
from trainer.errors import InputError
from trainer.model.config_keys import check_keys, check_parts
from trainer.model.tags import clean_tag, has_tags, known_tags
from trainer.run.checkpoints import MANIFEST, MODEL_CONFIG, WEIGHTS, checkpoint_folder
from trainer.safe_io.plain import read_json
from trainer.sysinfo.own_table import own_table
from trainer.text.near import near

_CONFIG_KEYS = ("embed_dim", "vision_cfg", "text_cfg")
HUB = "hf-hub:"
FOLDER = "local-dir:"
MODELS_OF_4 = frozenset(own_table(__file__, "models_of_4.toml")["names"])
"""Names of the models that open_clip has from release 4 on."""


def known_models() -> list[str]:
    """Returns the names of open_clip's configs, sorted; empty without open_clip (on a login node)."""
    return sorted(file.stem for folder in _config_folders() for file in folder.glob("*.json"))


def _config_folders() -> list[Path]:
    spec = importlib.util.find_spec("open_clip")
    return (
        [Path(folder) / "model_configs" for folder in spec.submodule_search_locations or ()] if spec else []
    )


def check_model(name: str) -> None:
    """Raises InputError for an unknown name, and for a config file that is missing or incomplete.

    The message has the nearest name.

    `hf-hub:` names are the hub's to check; without open_clip here, names are left to the ranks.
    """
    if name.startswith(HUB):
        return
    if name.startswith(FOLDER):
        _check_folder(Path(name.removeprefix(FOLDER)))
    elif name.endswith(".json"):
        _check_config(Path(name))
    else:
        _check_known(name)


def teacher_of(model: Model) -> Model:
    """Returns the teacher that a model names, with the student's precision, kernels and cache."""
    kept = {name: getattr(model, name) for name in ("precision", "kernels", "cache_dir", "offline")}
    return Model(name=str(model.teacher), pretrained=model.teacher_pretrained, sync_batch_norm=False, **kept)


def check_teacher(model: Model) -> None:
    """Raises InputError for a teacher or weights of it that cannot be used, as the functions below do."""
    if model.teacher is None:
        return
    check_same_teacher(model)
    teacher = teacher_of(model)
    try:
        check_model(teacher.name)
        check_pretrained(teacher.pretrained)
        check_tag(teacher.name, teacher.pretrained)
    except InputError as error:
        said = str(error).replace("model.pretrained", "model.teacher_pretrained")
        raise InputError(said.replace("model.name", "model.teacher")) from None


def check_same_teacher(model: Model) -> None:
    """Raises InputError if the teacher's weights may be others at the run's next start."""
    given = model.teacher_pretrained or ""
    if is_weights(given) and (now := checkpoint_folder(given)) != Path(given):
        raise InputError(
            f"model.teacher_pretrained: {given} stands for another checkpoint once its run has one, and a "
            f"teacher must be the same at every start: name a checkpoint, such as {now}"
        )


def weights_file(pretrained: str) -> str:
    """Returns the weights file of a checkpoint or a run of ours, which is a folder; anything else unchanged.

    A run folder stands for its newest checkpoint, RUN/best for the best one. A name that is no path, such as
    a tag, never does, whatever the current folder has.
    """
    if not is_weights(pretrained):
        return pretrained
    forms = (
        pretrained,
        *(normalize(form, pretrained) for form in ("NFC", "NFD")),
    )  # é has two, by the system
    pretrained = next(filter(os.path.exists, forms), pretrained)
    folder = checkpoint_folder(pretrained)
    return str(folder / WEIGHTS) if os.path.isfile(folder / MANIFEST) else pretrained


def check_pretrained(pretrained: str | None) -> None:
    """Raises InputError if `pretrained` is a path to weights that cannot be read."""
    if not is_weights(pretrained or ""):
        return
    file = weights_file(str(pretrained))
    if os.path.isdir(file):
        raise InputError(
            f"model.pretrained: {file} is a folder without {MANIFEST}: "
            "give a checkpoint (runs/NAME/checkpoints/step-...)"
        )
    if not os.access(file, os.R_OK):
        raise InputError(f"model.pretrained: there is no weights file that can be read at {file}")
    _check_kind("pretrained", file)


def check_init(model: Model) -> None:
    """Raises InputError if `model.init` names no weights that can be read, or timm's for another tower."""
    if model.init is None:
        return
    if model.init != "timm":
        file = weights_file(model.init)
        if not os.path.isfile(file) or not os.access(file, os.R_OK):
            raise InputError(f"model.init: there is no weights file that can be read at {file}")
        _check_kind("init", file)
        _check_widths(model, Path(file))
    elif "timm_model_name" not in read_config(model.name).get("vision_cfg", {"timm_model_name": ""}):
        raise InputError(
            f'model.init = "timm": the image tower of {model.name} is not one of timm\'s: give a weights file'
        )


def _check_kind(key: str, file: str) -> None:
    try:
        check_kind(Path(file))
    except InputError as problem:
        raise InputError(f"model.{key}: {problem}") from None


def _check_widths(model: Model, file: Path) -> None:
    """Raises InputError if `init` names a checkpoint of a model with both towers of another width."""
    there, own = read_config(str(file.with_name(MODEL_CONFIG))), read_config(model.name)
    parts = ("vision_cfg", "text_cfg") if model.text is None else ("vision_cfg",)
    old, new = _widths(there, parts), _widths(own, parts)
    if old and new and all(one != other for one, other in zip(old, new, strict=True)):
        raise InputError(
            f"model.init: {file} is of a model whose towers are {' and '.join(map(str, old))} wide, and "
            f"those of {model.name} are {' and '.join(map(str, new))}: nothing of it would fit; choose "
            "weights of the same widths"
        )


def _widths(config: Mapping[str, Any], parts: Sequence[str]) -> list[Any] | None:
    """Returns the widths of the towers; None if the config does not say them all."""
    found = [part_of(config, part).get("width") for part in parts]
    return None if None in found else found


def check_tag(name: str, tag: str | None) -> None:
    """Raises InputError for a tag that the model does not have (the message has the nearest).

    Other tags are open_clip's to check.
    """
    if not tag or is_weights(tag) or hub_of(tag):
        return
    if name.startswith((HUB, FOLDER)):
        raise InputError(
            f"model.pretrained: {name} has its own weights and none called {tag!r}: leave it out, or give a "
            "file or a run folder"
        )
    known = known_tags(_plain(name))
    if clean_tag(tag) in known or not (known or _has_no_tags(name)):
        return
    path = f"For a file or a run folder, write ./{tag}"
    if not known:
        raise InputError(
            f"model.pretrained: open_clip has no weights for {name}, so none called {tag!r}. {path}"
        )
    nearest = near(clean_tag(tag), known)
    hint = f"did you mean {', '.join(nearest)}?" if nearest else f"it has {', '.join(known)}."
    raise InputError(f"model.pretrained: {name} has no weights called {tag!r}; {hint} {path}")


def _has_no_tags(name: str) -> bool:
    """Returns whether open_clip here knows the model, and has weights for others alone."""
    return has_tags() and not name.endswith(".json") and _plain(name) in known_models()


def _plain(name: str) -> str:
    """Returns open_clip's form of a name: ViT-B/32 is ViT-B-32, and a config file goes by its name."""
    return Path(name).stem if name.endswith(".json") else name.replace("/", "-")


def config_file(name: str) -> Path:
    """Returns the path of a model's config.

    The path does not exist for the hub's models, and if open_clip is not installed.
    """
    if name.startswith(FOLDER):
        return Path(name.removeprefix(FOLDER)) / "open_clip_config.json"
    if name.endswith(".json"):
        return Path(name)
    return next((folder / f"{_plain(name)}.json" for folder in _config_folders()), Path(name))


def read_config(name: str) -> Mapping[str, Any]:
    """Returns the model's config in open_clip's format; empty if it cannot be read."""
    try:
        config = read_json(config_file(name), links=True)
    except (OSError, ValueError):
        return {}
    parts = config.get("model_cfg", config) if isinstance(config, dict) else None
    return parts if isinstance(parts, dict) else {}


def part_of(config: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Returns vision_cfg or text_cfg of a config; empty if it has none."""
    found = config.get(part)
    return found if isinstance(found, dict) else {}


def _check_known(name: str) -> None:
    known = known_models()
    plain = _plain(name)
    if plain in known:
        check_parts(read_config(name), name)
    if not known or plain in known:
        return
    if plain in MODELS_OF_4:
        raise InputError(f"model.name: {name} is a model of open_clip 4, and an older release is installed")
    by_lower = {model.lower(): model for model in known}
    meant = [by_lower[match] for match in near(plain.lower(), by_lower)]
    hint = (
        f"did you mean {', '.join(meant)}?" if meant else f"open_clip has for example {', '.join(known[:3])}."
    )
    raise InputError(f"model.name: unknown model {name!r}; {hint} For a config file, give its path (.json)")


def _check_folder(folder: Path) -> None:
    path = folder / "open_clip_config.json"
    if not path.is_file():
        raise InputError(f"model.name: {folder} contains no open_clip_config.json")
    config = _json(path)
    if not isinstance(config, dict) or "model_cfg" not in config:
        raise InputError(f"model.name: {path} lacks model_cfg, the model's config")
    check_keys(config["model_cfg"], str(path))


def _check_config(path: Path) -> None:
    config = _json(path)
    missing = (
        [key for key in _CONFIG_KEYS if key not in config] if isinstance(config, dict) else list(_CONFIG_KEYS)
    )
    if missing:
        raise InputError(
            f"model.name: {path} lacks {', '.join(missing)}; "
            f"a model config of open_clip has {', '.join(_CONFIG_KEYS)}"
        )
    check_keys(config, str(path))


def _json(path: Path) -> Any:
    """Returns the content of a config file; raises InputError if it has none."""
    try:
        return read_json(path, links=True)
    except FileNotFoundError:
        raise InputError(f"model.name: no such config file: {path}") from None
    except OSError as problem:
        raise InputError(f"model.name: {path} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise InputError(f"model.name: {path} is not JSON: {problem}") from None
