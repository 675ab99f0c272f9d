"""Captions laid end to end: a text tower then computes what stands in them, and little of what stands behind.

Each token sees only those before it in its caption, so what stands behind those that count changes nothing.
Some of it is computed, so that all tokens together are a multiple of `GRAIN` for each caption, and memory
meets few sizes.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.comm.host_memory import to_device

GRAIN = 4


class Packed(NamedTuple):
    """Captions of one forward pass; a model takes them in place of tokens [B, L]."""

    ids: Tensor
    """Tokens of all captions, int64 [tokens]."""
    positions: Tensor
    """Position of each token in its caption, int64 [tokens]."""
    starts: Tensor
    """Place of each caption's first token, and the number of all, int64 [B + 1]."""
    ends: Tensor
    """Place of the last token of each caption that counts, int64 [B]."""


def pack(tokens_BL: Tensor, counted_B: Tensor, device: torch.device, *, whole: bool = False) -> Packed:
    """Returns the captions on the device, packed; nobody waits for the copies.

    `tokens_BL` are on the host, and the first `counted_B` of each caption count. With `whole` all are
    computed.
    """
    length = tokens_BL.shape[1]
    spans_B = np.full(len(counted_B), length) if whole else _spans(counted_B, length).numpy()
    starts = np.concatenate([[0], spans_B.cumsum()])
    captions = np.repeat(np.arange(len(spans_B)), spans_B)  # numpy: torch would wake threads for it
    positions = np.arange(starts[-1]) - starts[captions]
    ids = tokens_BL.numpy()[captions, positions]
    parts = (ids, positions, starts, starts[:-1] + counted_B.numpy() - 1)
    return Packed(*(to_device(torch.from_numpy(part), device) for part in parts))


def _spans(counted_B: Tensor, longest: int) -> Tensor:
    """Returns how many tokens of each caption are computed: the first captions get what is left over."""
    captions, total = len(counted_B), int(counted_B.sum())
    grain = GRAIN * captions
    missing = min(-(-total // grain) * grain, captions * longest) - total
    room_B = longest - counted_B
    return counted_B + (missing - (room_B.cumsum(0) - room_B)).clamp(min=0).minimum(room_B)
