"""Contrastive losses, cut into the ranks' shares of one sum.

The shares add up to the loss of the whole global batch. Each rank compares its own rows with all ranks' rows,
so no rank builds the N x N matrix. D: width of the features; n: samples of this rank; N: samples of all
ranks. Features are unit vectors. A share gathers what it needs by the function that it is given.

These are the plain forms, which keep their n x N logits for the backward pass. Where no teacher judges whole
rows, `rank_loss.py` computes the same without keeping them; the plain forms are its oracle.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.positives import Positives

Gather = Callable[[Tensor], Tensor]
"""Gathers all ranks' rows, rank after rank, with their gradient: [n, D] -> [N, D]. Collective."""
Share = Callable[[Tensor, Tensor, Tensor, Tensor | None, Gather, int, float, Positives | None], Tensor]


def clip_share(
    image_nD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    gather: Gather,
    first: int,
    smoothing: float = 0.0,
    positives: Positives | None = None,
) -> Tensor:
    """Returns this rank's share of the softmax cross-entropy in both directions (arXiv 2103.00020), a scalar.

    `first` is the place of this rank's first sample among the N. The share `smoothing` of a row's target goes
    to all N alike; the rest is that of its own pair, or of all its `positives`. Collective.
    """
    image_ND, text_ND = gather(image_nD), gather(text_nD)
    image_logits_nN = scale * image_nD @ text_ND.T
    text_logits_nN = scale * text_nD @ image_ND.T
    if bias is not None:
        image_logits_nN, text_logits_nN = image_logits_nN + bias, text_logits_nN + bias
    target = (
        torch.arange(first, first + len(image_nD), device=scale.device)
        if positives is None
        else positives.target(first, 0, image_logits_nN)
    )
    of_images, of_texts = (
        F.cross_entropy(logits_nN, target, reduction="sum", label_smoothing=smoothing)
        for logits_nN in (image_logits_nN, text_logits_nN)
    )
    return (of_images + of_texts) / (2 * len(image_ND))


def siglip_share(
    image_nD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    gather: Gather,
    first: int,
    _smoothing: float = 0.0,
    positives: Positives | None = None,
) -> Tensor:
    """Returns this rank's share of the sigmoid loss, a scalar (arXiv 2303.15343).

    Each pair has a sigmoid; the loss is summed over pairs and averaged over images. A rank takes the pairs of
    its own images, so only texts are gathered. There is no softmax to smooth. All pairs of `positives` count
    as matches.
    Raises ValueError if the model has no logit bias. Collective.
    """
    text_ND = gather(text_nD)
    logits_nN = scale * image_nD @ text_ND.T + needed_bias(bias)
    sign_nN = torch.full_like(logits_nN, -1.0)
    if positives is None:
        sign_nN.diagonal(first).fill_(1.0)
    else:
        sign_nN.masked_fill_(positives.same(first, 0, sign_nN), 1.0)
    return -F.logsigmoid(sign_nN * logits_nN).sum() / len(text_ND)


def needed_bias(bias: Tensor | None) -> Tensor:
    """Returns the logit bias of the SigLIP loss; raises ValueError if the model has none."""
    if bias is None:
        raise ValueError("the SigLIP loss needs a model with a logit bias")
    return bias


SHARES: dict[str, Share] = {"clip": clip_share, "siglip": siglip_share}
