"""Gives the weights of a file the names of a plain model, wherever open_clip reads one.

torch.compile, DistributedDataParallel and Lightning wrap a model, and its weights have the wrapper's name.
The adapters of a checkpoint of LoRA are added to their weights.
"""

import logging
from collections.abc import Iterable
from typing import Any

import open_clip.factory
from torch import Tensor

from trainer.model.lora import without_adapters

log = logging.getLogger("clipship")

_WRAPPERS = ("module.", "_orig_mod.", "model.", "net.", "clip_model.")
_OURS = ("visual.", "logit_scale", "text.", "token_embedding.", "positional_embedding")
"""Beginnings of names in open_clip."""
_reads: Any = open_clip.factory.load_state_dict


def prefix_of(names: Iterable[str]) -> str:
    """Returns what stands before open_clip's names; "" if nothing does, or something unknown."""
    known, prefix = list(names), ""
    while not any(name.startswith(_OURS) for name in known):
        wrapper = next((each for each in _WRAPPERS if any(name.startswith(each) for name in known)), "")
        if not wrapper:
            return ""
        prefix += wrapper
        known = [name.removeprefix(wrapper) for name in known if name.startswith(wrapper)]
    return prefix


def take_off_prefixes() -> None:
    """Makes open_clip read weights by `_load`."""
    open_clip.factory.load_state_dict = _load


def _load(path: str, device: str = "cpu", weights_only: bool = True) -> dict[str, Tensor]:
    """Returns the tensors of a file by open_clip's names."""
    tensors = without_adapters(_reads(path, device=device, weights_only=weights_only))
    prefix = prefix_of(tensors)
    if not prefix:
        return tensors
    ours = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    others = len(tensors) - len(ours)
    left = f"; {others} others do not begin with it and are left out" if others else ""
    log.info("%-12s %s: %r is taken off the names of %d tensors%s", "weights", path, prefix, len(ours), left)
    return ours
