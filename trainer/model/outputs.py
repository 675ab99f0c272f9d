"""Names what a forward pass gives, whatever the kind of model, and sets the precision in which it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config import Precision
from trainer.model.open_clip_api import next_token_logits
from trainer.model.packed_captions import Packed

_NAMES = {"image_features": "image", "text_features": "text", "logit_scale": "scale", "logit_bias": "bias"}
"""Names of this module by those of open_clip's, in the order of its tuples."""
_LOGITS = ("scale", "bias")
_WRITTEN = "logits"
_HALF = (torch.float16, torch.bfloat16)


class Outputs(NamedTuple):
    """Outputs of a model for n images and n texts; each is float32 or wider, but for `written`.

    A model has a logit bias for the SigLIP loss alone.
    """

    image: Tensor
    """Unit vectors [n, D]."""
    text: Tensor
    """Unit vectors [n, D]."""
    scale: Tensor
    bias: Tensor | None = None
    written: Tensor | None = None
    """Logits of each caption's next token, [n, L - 1, vocabulary], of a model that writes captions. They
    stay in the precision of the pass: they are larger than all the rest.
    """


def outputs(model: nn.Module, images: Tensor, tokens: Tensor | Packed, precision: Precision) -> Outputs:
    """Returns the outputs for images [n, 3, H, W] and tokens [n, L] or packed ones."""
    with autocast(images.device, precision):
        return named(model(images, tokens))


def named(out: Any) -> Outputs:
    """Returns what a model of open_clip has returned: a tuple, or a dictionary if it writes captions.

    Logit scale and bias have one dimension in a model whose config says `nonscalar_logit_scale`.
    """
    if not isinstance(out, dict):
        out = dict(zip(_NAMES, out, strict=False))
    known = {ours: _wide(out[theirs]) for theirs, ours in _NAMES.items() if theirs in out}
    known |= {name: known[name].reshape(()) for name in _LOGITS if name in known}
    return Outputs(**known, written=next_token_logits(out[_WRITTEN]) if _WRITTEN in out else None)


def features(
    model: nn.Module, images: Tensor, tokens: Tensor | Packed, precision: Precision
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the image features, the text features, the logit scale, and the logit bias or None."""
    return outputs(model, images, tokens, precision)[:4]


@contextmanager
def on_image_features(model: nn.Module, call: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls a function with the images' features as soon as a forward pass in the block has them.

    They are as `outputs` returns them, without a graph. The text tower begins afterwards. `model` is the
    model itself, which another module may wrap. One that writes captions has them in no such place, and the
    function is not called.
    """

    def seen(_module: nn.Module, _inputs: Any, image: Any) -> None:
        if isinstance(image, Tensor):
            call(_wide(F.normalize(image.detach(), dim=-1)))

    hook = model.get_submodule("visual").register_forward_hook(seen)
    try:
        yield
    finally:
        hook.remove()


def half_type(precision: Precision) -> torch.dtype | None:
    """Returns the type in which autocast computes most layers; None without autocast."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast(device: torch.device, precision: Precision, *, cache_enabled: bool = True) -> torch.autocast:
    """Returns the autocast context of the job's precision for forward passes; parameters stay float32.

    Within it, the copy of a parameter in half precision is made once unless `cache_enabled` is false.
    """
    half = half_type(precision)
    return torch.autocast(
        device.type, dtype=half or torch.bfloat16, enabled=half is not None, cache_enabled=cache_enabled
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
