"""Keys and values that a model config in open_clip's format may have.

A config may be a stranger's, and open_clip hands its keys on as arguments: to its own classes, to timm and to
transformers, which runs code for some of them. Only what stands here reaches them. Imports no torch and no
open_clip.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, TypeGuard

from trainer.errors import InputError

_FEW = 5
_MOST, _WIDEST, _MOST_LAYERS = 2**24, 2**17, 1024
"""Largest number of a config, greatest width and most layers of a tower: beyond all models that there are."""


@dataclass(frozen=True)
class Kind:
    """Values that a key may have; None, which stands for open_clip's default, is one of each kind."""

    words: str
    holds: Callable[[Any], bool]


def _whole(value: Any, least: int = 1, most: int = _MOST) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most


def _all(value: Any, length: int, most: int = _MOST) -> bool:
    return isinstance(value, list) and len(value) == length and all(_whole(each, most=most) for each in value)


def _plain_name(value: Any) -> bool:
    return isinstance(value, str) and ":" not in value


_SIZE = Kind(f"a whole number from 1 to {_MOST:,}", _whole)
_WIDTH = Kind(f"a whole number from 1 to {_WIDEST:,}", lambda value: _whole(value, most=_WIDEST))
_ID = Kind(f"a whole number from 0 to {_MOST:,}", lambda value: _whole(value, least=0))
_SIDES = Kind(f"{_SIZE.words}, or two of them", lambda value: _whole(value) or _all(value, 2))
_LAYERS = Kind(f"a whole number from 1 to {_MOST_LAYERS:,}", lambda value: _whole(value, most=_MOST_LAYERS))
_STAGES = Kind(
    f"{_LAYERS.words}, or four of them",
    lambda value: _LAYERS.holds(value) or _all(value, 4, _MOST_LAYERS),
)
_NUMBER = Kind("a number", lambda value: type(value) in (int, float) and isfinite(value))
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_WORD = Kind("a word", lambda value: isinstance(value, str))
_POOL = Kind("a word, true or false", lambda value: isinstance(value, str | bool))
_TIMM = Kind("the name of a model of timm, and of no hub or folder (no colon)", _plain_name)

Keys = Mapping[str, "Kind | Keys"]

_BLOCKS: Keys = {
    "width": _WIDTH,
    "mlp_ratio": _NUMBER,
    "ls_init_value": _NUMBER,
    "final_ln_after_pool": _FLAG,
    "pool_type": _WORD,
    "output_tokens": _FLAG,
    "act_kwargs": {"approximate": _WORD},
    "norm_kwargs": {"eps": _NUMBER},
    "block_type": _WORD,
    "qk_norm": _FLAG,
    "scaled_cosine_attn": _FLAG,
    "scale_heads": _FLAG,
    "scale_attn_inner": _FLAG,
    "scale_attn": _FLAG,
    "scale_fc": _FLAG,
}
_TIMM_4: Keys = {
    "patch_size": _SIDES,
    "pos_embed_grid_size": _SIDES,
    "embed_dim": _WIDTH,
    "depth": _LAYERS,
    "num_heads": _SIZE,
    "mlp_ratio": _NUMBER,
    "attn_pool_mlp_ratio": _NUMBER,
    "swiglu_mlp": _FLAG,
}
VISION_4: Keys = {"image_seq_len": _SIZE, "timm_model_kwargs": _TIMM_4}
"""Keys that open_clip knows from release 4 on; an older one refuses them."""
TEXT_4: Keys = {
    "text_arch": _WORD,
    "variable_text": _FLAG,
    "bos_id": _ID,
    "tokenizer_type": _WORD,
    "tiktoken_name": _WORD,
    "attention_mode": _WORD,
    "pos_embed": _WORD,
    "rope_temperature": _NUMBER,
    "mlp_type": _WORD,
    "norm_type": _WORD,
    "norm_eps": _NUMBER,
    "attn_gated": _FLAG,
    "pre_norm": _FLAG,
    "norm_placement": _WORD,
    "zero_init_residual": _FLAG,
    "reg_tokens": _ID,
    "value_residual": _FLAG,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "gate_bias": _FLAG,
    "hf_model_config": {
        "max_position_embeddings": _SIZE,
        "hidden_dropout_prob": _NUMBER,
        "attention_probs_dropout_prob": _NUMBER,
    },
}
VISION: Keys = {
    **_BLOCKS,
    "layers": _STAGES,
    "head_width": _SIZE,
    "patch_size": _SIDES,
    "image_size": _SIDES,
    "patch_dropout": _NUMBER,
    "attentional_pool": _POOL,
    "attn_pooler_queries": _SIZE,
    "attn_pooler_heads": _SIZE,
    "no_ln_pre": _FLAG,
    "pos_embed_type": _WORD,
    "timm_model_name": _TIMM,
    "timm_model_pretrained": _FLAG,
    "timm_pool": _WORD,
    "timm_proj": _WORD,
    "timm_proj_bias": _FLAG,
    "timm_drop": _NUMBER,
    "timm_drop_path": _NUMBER,
    **VISION_4,
}
TEXT: Keys = {
    **_BLOCKS,
    "layers": _LAYERS,
    "context_length": _SIZE,
    "vocab_size": _SIZE,
    "hf_tokenizer_name": _WORD,
    "tokenizer_mode": _WORD,
    "tokenizer_kwargs": {"clean": _WORD, "language": _WORD, "strip_sep_token": _FLAG},
    "heads": _SIZE,
    "embed_cls": _FLAG,
    "pad_id": _ID,
    "eos_id": _ID,
    "no_causal_mask": _FLAG,
    "proj_bias": _FLAG,
    "proj_type": _WORD,
    "hf_model_name": _WORD,
    "hf_model_pretrained": _FLAG,
    "hf_proj_type": _WORD,
    "hf_pooler_type": _WORD,
    **TEXT_4,
}
MULTIMODAL: Keys = {**TEXT, "dim_head": _SIZE, "n_queries": _SIZE, "attn_pooler_heads": _SIZE}
CONFIG: Keys = {
    "embed_dim": _WIDTH,
    "vision_cfg": VISION,
    "text_cfg": TEXT,
    "multimodal_cfg": MULTIMODAL,
    "quick_gelu": _FLAG,
    "custom_text": _FLAG,
    "init_logit_scale": _NUMBER,
    "init_logit_bias": _NUMBER,
    "nonscalar_logit_scale": _FLAG,
    "output_dict": _FLAG,
    "pad_id": _ID,
}
"""Keys of a whole config, with those of its parts."""
OTHER_PARTS = {
    "audio_cfg": "a model of audio and text (CLAP)",
    "audio_naflex_cfg": "a model of audio and text (GenLAP)",
    "genlap_cfg": "a model of audio and text (GenLAP)",
    "genlip_cfg": "a model that writes captions and compares none (GenLIP)",
}
"""Parts of open_clip's configs whose models are not trained here, with what they are."""


def check_keys(config: object, place: str) -> None:
    """Raises InputError that lists the keys and values of a config which open_clip must not be given.

    `place` is the config's file or name.
    """
    check_parts(config, place)
    if problems := list(_problems(config, CONFIG, "")):
        raise InputError("\n".join(f"model.name: {place}: {problem}" for problem in problems))


def check_parts(config: object, place: str) -> None:
    """Raises InputError for a model that is none of images and texts; `place` as for `check_keys`."""
    for part, what in OTHER_PARTS.items():
        if isinstance(config, Mapping) and part in config:
            raise InputError(f"model.name: {place} is {what}: Clipship trains models of images and texts")


def _problems(given: object, keys: Keys, name: str) -> Iterator[str]:
    if not isinstance(given, Mapping):
        yield f"{name or 'the config'} is {_short(given)}, and must be a table of keys"
        return
    for key, value in given.items():
        kind, full = keys.get(key), f"{name}.{key}".lstrip(".")
        if kind is None:
            yield f"{full} is no key that a model config may have: remove it{_instead(key, keys)}"
        elif value is None:
            continue
        elif not isinstance(kind, Kind):
            yield from _problems(value, kind, full)
        elif not kind.holds(value):
            yield f"{full} is {_short(value)}, and must be {kind.words}"


def _instead(key: object, keys: Keys) -> str:
    """Returns the allowed keys if they are few, else those that are nearest."""
    few = len(keys) <= _FEW
    near = list(keys) if few else get_close_matches(str(key), list(keys))
    return (
        f" ({'allowed are' if few else 'did you mean'} {', '.join(near)}{'' if few else '?'})" if near else ""
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
