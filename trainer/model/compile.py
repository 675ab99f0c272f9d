"""Applies torch.compile to the blocks that a tower repeats, one by one, rather than to the model as a whole.

Blocks of one shape share their kernels, so that a deep tower compiles in the time of a shallow one. A block's
gradients are ready as soon as its own backward pass is, so that their reduction over the ranks overlaps the
rest. Parameters keep their names.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.comm.blocks import repeated_blocks
from trainer.internals import allow_graphs
from trainer.model.sync_batch_norm import SyncBatchNorm, SyncBatchNormAct
from trainer.sysinfo.user_cache import node_cache
from trainer.text.wording import many

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""Variables with the folders in which torch and Triton keep what they have compiled."""
_PASSES = 2  # with a graph and without: each has its own kernels


@dataclass(frozen=True)
class Compiled:
    """Number of blocks of a model that are compiled, and of those that are not."""

    blocks: int
    communicating: int
    """Blocks with synchronised batch norm; they are not compiled, as no kernel can hold a collective."""

    def __str__(self) -> str:
        uncompiled = many(self.communicating, "block")
        rest = f"; {uncompiled} with synchronised batch norm cannot be compiled" if self.communicating else ""
        return f"{many(self.blocks, 'block')}, each at its first pass{rest}"


def keep_kernels(env: MutableMapping[str, str]) -> str:
    """Sets where compiled kernels are kept, and returns that folder; "" if torch's own choice stays.

    The folder is this user's, on the node's own disk: ranks that start again on the node, in this start or in
    a later one, load the kernels instead of compiling them. torch's own choice is a folder in /tmp that
    another user may have made before, or that goes away with the job. A variable that is set stays.
    """
    if folder := env.get(_INDUCTOR):
        return folder
    own = node_cache("kernels")
    if own is None:
        return ""
    env[_INDUCTOR] = str(own / "inductor")
    env.setdefault(_TRITON, str(own / "triton"))
    return str(own)


def compile_blocks(model: nn.Module) -> Compiled:
    """Compiles the repeated blocks at their first pass in training mode; evaluation mode stays as it was.

    Each kernel is for one shape, never for a range of shapes: a pass made before a kernel was compiled must
    not change its results.
    """
    blocks = repeated_blocks(model)
    alone = [block for block in blocks if not _communicates(block)]
    for block in alone:
        block.forward = _in_training(block, block.forward)
    # Dropout rates and sizes that differ between blocks are constants of a kernel; past this limit blocks
    # would not be compiled.
    allow_graphs(_PASSES * len(alone))
    return Compiled(len(alone), len(blocks) - len(alone))


def _in_training(block: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
    fast = torch.compile(plain, dynamic=False)

    def forward(*inputs: Any, **named: Any) -> Any:
        return (fast if block.training else plain)(*inputs, **named)

    return forward


def _communicates(block: nn.Module) -> bool:
    return any(isinstance(module, SyncBatchNorm | SyncBatchNormAct) for module in block.modules())
