"""The written reference is that of the code: job file, JSON Schema, command line."""

from typing import Any

from tools.reference import UNITS, description, files, job_schema, unit
from trainer.config import Job, Section
from trainer.config.keys import walk

KEYS = [".".join(key) for key, _ in walk(Job)]

_PLAIN_NUMBERS = {
    "optim.label_smoothing",
    "optim.contrast_weight",
    "optim.caption_weight",
    "optim.distill_weight",
    "optim.distill_temperature",
    "seed",
    "optim.lr",
    "optim.min_lr",
    "optim.image_lr",
    "optim.text_lr",
    "optim.image_layer_decay",
    "optim.ema_decay",
    "eval.mix",
    "optim.ema_from_step",
    "model.unlock_after_step",
    "optim.text_layer_decay",
    "optim.cooldown_share",
    "optim.cooldown_power",
    "optim.decay_from_step",
    "optim.decay_from_lr",
    "optim.weight_decay",
    "optim.anchor",
    "optim.beta1",
    "optim.beta2",
    "optim.eps",
    "optim.grad_clip_norm",
    "optim.max_logit_scale",
    "model.init_max_missing",
    "model.lora_alpha",
    "model.lora_rank",
    "model.patch_dropout",
    "data.augment.rand_augment_magnitude",
    "data.augment.color_jitter_prob",
    "data.augment.gray_scale_prob",
    "data.augment.erase_prob",
    "model.image_mean",
    "model.image_std",
    "data.crop_scale",
    "data.weights",
    "data.max_bad_share",
    "health.slow_rank_factor",
}
"""Numeric keys that have no unit."""


def schema_of(key: str) -> dict[str, Any]:
    """Returns the schema's entry for a dotted key."""
    place = job_schema()
    for name in key.split("."):
        place = place["properties"][name]
    return place


def test_the_committed_reference_is_the_codes() -> None:
    stale = [
        path.name
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `make reference` and commit what it writes"


def test_every_key_has_a_description() -> None:
    missing = [key for key in KEYS if not description(tuple(key.split(".")))]
    assert not missing, "write a docstring below each of these keys in trainer/config/"


def test_every_number_has_a_unit_or_is_known_to_have_none() -> None:
    numbers = [
        key for key in KEYS if '"properties"' not in str(schema_of(key)) and _is_number(schema_of(key))
    ]
    missing = [key for key in numbers if unit(key) is None and key not in _PLAIN_NUMBERS]
    assert not missing, "name their units in tools/units.toml"
    assert set(KEYS) >= _PLAIN_NUMBERS
    assert all(any(key.endswith(ending) for key in KEYS) for ending in UNITS)


def _is_number(place: dict[str, Any]) -> bool:
    kinds = [part.get("type") for part in place.get("anyOf", [place])]
    return bool(kinds) and all(kind in ("integer", "number") for kind in kinds)


def test_sections_and_keys_of_every_scheduler_are_described() -> None:
    assert issubclass(Job, Section)
    assert {"slurm", "slurm.partition", "kubernetes", "kubernetes.namespace"} <= set(KEYS)
