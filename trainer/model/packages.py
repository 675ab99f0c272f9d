"""Rows of models: the packages that one needs besides Clipship's own, and what Clipship can do with it.

Both follow from its config. `check`, the image and the table of all models read the same row. Imports no
torch and no open_clip.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import Job, Model
from trainer.config.losses import LOSSES
from trainer.errors import InputError
from trainer.model.catalog import part_of, read_config, teacher_of
from trainer.model.config_keys import OTHER_PARTS

TEXT_PACKAGES = ("transformers", "sentencepiece", "protobuf")
"""Packages of the extra `text`, which docker/requirements-text.txt pins."""
_TIKTOKEN = "tiktoken"
NOT_ITS_LOSS = {
    False: 'also writes captions (CoCa): set optim.loss = "coca", or choose a model with two towers alone',
    True: 'writes no captions, which optim.loss = "coca" is for: set "clip", or choose a CoCa model',
}
"""Predicates of a sentence about a model, by whether the loss is one of captions."""
_IMPORTED_AS = {"protobuf": "google.protobuf"}


@dataclass(frozen=True)
class Need:
    """Row of a model: what it needs, and what can be done with it."""

    packages: tuple[str, ...] = ()
    """Packages by their names for pip."""
    reason: str = ""
    """Reason for the packages, which becomes part of a sentence."""
    captions: bool = False
    """True if it also writes captions, which a loss of its own trains (CoCa)."""


def needed(model: Model) -> Need:
    """Returns the row of a model.

    The hub's models, and configs that cannot be read, need nothing and are left to the ranks. The rules are
    those of open_clip's factory.py: text towers and tokenizers of Hugging Face's, and a vocabulary for names
    with siglip.
    """
    config = read_config(model.name)
    if config.keys() & OTHER_PARTS.keys():
        return Need()  # the model is refused
    captions = "multimodal_cfg" in config
    if reason := _text_reason(model, config):
        return Need(TEXT_PACKAGES, reason, captions)
    if part_of(config, "text_cfg").get("tokenizer_type") == _TIKTOKEN:
        return Need((_TIKTOKEN,), f"its tokenizer is {_TIKTOKEN}'s", captions)
    return Need(captions=captions)


def _text_reason(model: Model, config: Mapping[str, Any]) -> str:
    """Returns why the model needs the packages of Hugging Face's text towers; "" if it does not."""
    if model.text is not None:
        return f"its text tower is model.text = {model.text}"
    text = part_of(config, "text_cfg")
    if tower := text.get("hf_model_name"):
        return f"its text tower is {tower} from Hugging Face"
    if tokenizer := text.get("hf_tokenizer_name"):
        return f"its tokenizer is {tokenizer} from Hugging Face"
    if ":" not in model.name and "siglip" in Path(model.name).name.lower():
        return (
            "open_clip fetches SigLIP's vocabulary for every model with siglip in its name, "
            "unless text_cfg names a hf_tokenizer_name"
        )
    return ""


def check_packages(job: Job) -> None:
    """Raises InputError if this machine's ranks lack a package that the model needs."""
    need = needed(job.model)
    lacking = [name for name in need.packages if not _is_here(name)]
    if lacking:
        raise InputError(
            f"model.name: {job.model.name} needs {_listed(lacking)} ({need.reason}): "
            f"`pip install {' '.join(lacking)}`"
        )


def check_text_mask(job: Job) -> None:
    """Raises InputError for data.text_mask if the model's tokenizer is another library's.

    A config that cannot be read is left to the ranks.
    """
    if job.data.text_mask is not None and (need := needed(job.model)).packages:
        raise InputError(
            f'data.text_mask = "{job.data.text_mask}" is for open_clip\'s own tokenizer, and '
            f"{job.model.name} needs {_listed(list(need.packages))} ({need.reason}): remove the key"
        )


def check_teacher_tokens(model: Model) -> None:
    """Raises InputError if a teacher reads captions by another tokenizer than the model does.

    A config that cannot be read is left to the ranks.
    """
    if model.teacher is None:
        return
    if any(needed(each).packages for each in (model, teacher_of(model))):
        raise InputError(
            f"model.teacher: {model.teacher} and {model.name} must read captions by the same tokenizer, "
            "which is known of models with open_clip's own alone"
        )


def check_loss(job: Job) -> None:
    """Raises InputError if the loss does not fit the model: one of captions is for those that write them.

    A config that cannot be read is left to the ranks.
    """
    writes = LOSSES[job.optim.loss].captions
    if read_config(job.model.name) and needed(job.model).captions != writes:
        raise InputError(f"model.name: {job.model.name} {NOT_ITS_LOSS[writes]}")
    check_captions(job)


def check_captions(job: Job) -> None:
    """Raises InputError for keys of a model that writes captions which open_clip's CoCa does not have."""
    settings = job.model
    locks = [name for name in ("lock_image", "lock_text", "lora_rank") if getattr(settings, name)]
    if LOSSES[job.optim.loss].captions and (keys := [*locks, *["cuda_graphs"] * settings.cuda_graphs]):
        raise InputError(
            f"model.{keys[0]}: {settings.name} writes captions (CoCa), and its parts cannot be "
            f"{'locked' if locks else 'captured'} one by one: remove the key"
        )


def image_has_text(job: Job) -> bool:
    """Returns whether the image gets the pinned packages of text towers: a job that names none needs them."""
    return needed(job.model).packages == TEXT_PACKAGES and not set(TEXT_PACKAGES) & _named(job)


def image_packages(job: Job) -> tuple[str, ...]:
    """Returns the packages that pip adds to the image beside pinned ones.

    Those that the job names come first, then those that its model needs besides.
    """
    return (*job.image.pip_packages, *(() if image_has_text(job) else not_named(job)))


def not_named(job: Job) -> tuple[str, ...]:
    """Returns the packages that the model needs and image.pip_packages does not name."""
    return tuple(name for name in needed(job.model).packages if name not in _named(job))


def _named(job: Job) -> set[str]:
    return {re.split(r"[^\w.-]", text, maxsplit=1)[0].lower() for text in job.image.pip_packages}


def _is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(_IMPORTED_AS.get(package, package)) is not None
    except ModuleNotFoundError:  # the package's parent package is missing
        return False


def _listed(names: list[str]) -> str:
    return f"the package {names[0]}" if len(names) == 1 else f"the packages {', '.join(names)}"
