"""Knows what differs between the releases 3.3 and 4 of open_clip, for the rest of this package.

Each name is found by what open_clip has, not by its version, so that a checkout between two releases is taken
for what it is. Everything else asks here.
"""

from typing import Any

from open_clip import transformer
from open_clip.coca_model import CoCa
from open_clip.model import CLIPVisionCfg
from torch import Tensor, nn

LOGGERS = ("", "open_clip.factory")
"""Names of the loggers that say that a model begins with random weights: 3.3 takes the root's."""
_HAS_LABELS = "output_labels" in CoCa.forward.__code__.co_varnames
"""True if a model that writes captions leaves out the logits behind the last token: before release 4."""
_OWN_ATTENTION = getattr(transformer, "Attention", None)
"""Class of open_clip's own attention: in 3.3 that of custom blocks, from 4 on that of all blocks."""
_MODERN_TEXT = getattr(transformer, "ModernTextTransformer", None)
"""Class of text towers with RoPE, from 4 on."""


def encoders_of(model: nn.Module) -> tuple[str, str]:
    """Returns the names of the functions by which the model's forward pass encodes images and texts."""
    image, text = "encode_image", "encode_text"
    inner = f"_{text}"  # from 4 on: the other names are for callers
    return (f"_{image}", inner) if inner in type(model).forward.__code__.co_names else (image, text)


def of_budget(tokens: int) -> dict[str, int]:
    """Returns the keys of a config's vision_cfg that say most patches of an image; none before release 4."""
    key = "image_seq_len"
    return {key: tokens} if key in CLIPVisionCfg.__dataclass_fields__ else {}


def next_token_logits(logits: Tensor) -> Tensor:
    """Returns the logits of each caption's next token, [n, L - 1, vocabulary], of what a CoCa model gives."""
    return logits if _HAS_LABELS else logits[:, :-1]


def is_plain_attention(attn: Any) -> bool:
    """Returns whether a block's attention is softmax(Q K) V of one joint projection, and nothing else.

    Its inputs are [B, T, width], and its parameters have the names of `nn.MultiheadAttention`.
    """
    if type(attn) is nn.MultiheadAttention:
        return bool(
            attn.batch_first
            and attn.in_proj_weight is not None
            and attn.bias_k is None
            and not attn.add_zero_attn
            and not attn.dropout
        )
    return (
        type(attn) is _OWN_ATTENTION
        and all(getattr(attn, name, None) is not None for name in ("in_proj_weight", "in_proj_bias"))
        and all(getattr(attn, name, None) is None for name in ("logit_scale", "head_scale"))
        and all(isinstance(getattr(attn, name), nn.Identity) for name in ("ln_q", "ln_k", "ln_inner"))
        and not attn.attn_drop.p
        and not attn.out_drop.p
    )


def modern_padding(tower: Any) -> int | None:
    """Returns the id of the padding that a modern text tower masks; None for another tower."""
    return tower.pad_id if _MODERN_TEXT is not None and type(tower) is _MODERN_TEXT else None
