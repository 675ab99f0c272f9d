"""Contrastive losses, cut into the ranks' shares of one sum.

The shares add up to the loss of the whole global batch. Each rank compares its own rows with all ranks' rows,
so no rank builds the N x N matrix. D: width of the features; n: samples of this rank; N: samples of all
ranks. Features are unit vectors; nothing here communicates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Gathered:
    """One modality's features: those of this rank and those of all ranks."""

    own_nD: Tensor
    all_ND: Tensor


Share = Callable[[Gathered, Gathered, Tensor, Tensor | None, int], Tensor]


def clip_share(image: Gathered, text: Gathered, scale: Tensor, bias: Tensor | None, first: int) -> Tensor:
    """Returns this rank's share of the softmax cross-entropy in both directions (arXiv 2103.00020), a scalar.

    `first` is the place of this rank's first sample among the N.
    """
    place_n = torch.arange(first, first + len(image.own_nD), device=scale.device)
    image_logits_nN = scale * image.own_nD @ text.all_ND.T
    text_logits_nN = scale * text.own_nD @ image.all_ND.T
    if bias is not None:
        image_logits_nN, text_logits_nN = image_logits_nN + bias, text_logits_nN + bias
    both = F.cross_entropy(image_logits_nN, place_n, reduction="sum") + F.cross_entropy(
        text_logits_nN, place_n, reduction="sum"
    )
    return both / (2 * len(image.all_ND))


def siglip_share(image: Gathered, text: Gathered, scale: Tensor, bias: Tensor | None, first: int) -> Tensor:
    """Returns this rank's share of the sigmoid loss, a scalar (arXiv 2303.15343).

    Each pair has a sigmoid; the loss is summed over pairs and averaged over images. Raises ValueError if the
    model has no logit bias.
    """
    if bias is None:
        raise ValueError("the SigLIP loss needs a model with a logit bias")
    logits_nN = scale * image.own_nD @ text.all_ND.T + bias
    sign_nN = torch.full_like(logits_nN, -1.0)
    rows_n = torch.arange(len(logits_nN), device=scale.device)
    sign_nN[rows_n, rows_n + first] = 1.0
    return -F.logsigmoid(sign_nN * logits_nN).sum() / len(text.all_ND)


SHARES: dict[str, Share] = {"clip": clip_share, "siglip": siglip_share}
