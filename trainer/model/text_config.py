"""Text part of a model's config after the job's keys have changed it. Imports no torch and no open_clip."""

from collections.abc import Mapping
from typing import Any

from trainer.config import Model
from trainer.config.training import HUB_TEXT
from trainer.errors import InputError

_CONTEXT_LENGTH = 77
_POOLERS = {"cls": "cls_last_hidden_state_pooler", "mean": "mean_pooler", "pooler": "cls_pooler"}
"""open_clip's name of each value of `model.text_pooling`."""


def text_config(settings: Model, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns open_clip's text_cfg of the model that the settings describe, with names as they give them.

    Raises InputError for settings that only a tower of Hugging Face has.
    """
    own = dict(config["text_cfg"])
    if settings.text is not None and "hf_model_name" not in own:
        own = {"hf_pooler_type": "mean_pooler", "hf_proj_type": "linear"} | {
            key: own[key] for key in ("context_length",) if key in own
        }
    if settings.text is not None:
        place = settings.text.removeprefix(HUB_TEXT)
        own |= {"hf_model_name": place, "hf_tokenizer_name": place}
    own["context_length"] = settings.context_length or own.get("context_length", _CONTEXT_LENGTH)
    chosen = {"text_pooling": settings.text_pooling, "text_projection": settings.text_projection}
    if "hf_model_name" not in own:
        for key, value in chosen.items():
            if value is not None:
                raise InputError(
                    f"model.{key} = {value} belongs to a text tower of Hugging Face, and that of "
                    f"{settings.name} is open_clip's own: remove it, or name a tower by model.text"
                )
        return own
    if settings.text_pooling is not None:
        own["hf_pooler_type"] = _POOLERS[settings.text_pooling]
    if settings.text_projection is not None:
        own["hf_proj_type"] = settings.text_projection
    return own
