"""Functions that the loss in tiles calls on a tile of logits between its products: plain, and fused on a GPU.

The plain form takes one operation after another. In the fused form torch.compile makes one or two kernels of
each function, so that a tile is read once and not five times; the plain form is its oracle, at each start
too. Letters: a tile has R rows and C columns of logits.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.comm.accelerator import is_cuda
from trainer.config import Model
from trainer.internals import compile_in_this_process
from trainer.model import kernel_trial

_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_MANY = 16
"""Tiles from which fusing them is worth what torch.compile takes of a start: 7 s at first, then 3."""
_CLOSE = 1e-4
"""Largest difference of both forms on a small tile in float32, relative and absolute."""


@dataclass(frozen=True)
class TileKernels:
    """Functions of a tile of logits, which they may overwrite. They change `norm_R` and `sums_2` in place."""

    add_to_norm: Callable[[Tensor, Tensor], None]
    """(logits_RC, norm_R): adds the logits of each row to a log-sum-exp."""
    clip_weights: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(logits_RC, norm_R, norm_C): returns exp(z - norm of its row) + exp(z - norm of its column)."""
    siglip_weights: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    """(logits_RC, bias, sums_2, match): returns the derivative of each pair's loss.

    A pair is a match if its column is its row plus `match`. Adds the sum of all losses to `sums_2`, and that
    of the derivatives.
    """


def _add_to_norm(logits_RC: Tensor, norm_R: Tensor) -> None:
    largest_R1 = logits_RC.amax(1, keepdim=True)
    added_R = logits_RC.sub_(largest_R1).exp_().sum(1).log_().add_(largest_R1[:, 0])
    torch.logaddexp(norm_R, added_R, out=norm_R)


def _clip_weights(logits_RC: Tensor, norm_R: Tensor, norm_C: Tensor) -> Tensor:
    weights_RC = (logits_RC - norm_R[:, None]).exp_()
    weights_RC += logits_RC.sub_(norm_C).exp_()
    return weights_RC


def _siglip_weights(logits_RC: Tensor, bias: Tensor, sums_2: Tensor, match: int) -> Tensor:
    margin_RC = logits_RC.add_(bias).neg_()
    matches = margin_RC.diagonal(match)
    matches.neg_()
    sums_2[0] -= F.logsigmoid(margin_RC).sum()
    weights_RC = margin_RC.neg_().sigmoid_()
    matches.neg_()  # they share the memory of the weights
    sums_2[1] += weights_RC.sum()
    return weights_RC


PLAIN = TileKernels(_add_to_norm, _clip_weights, _siglip_weights)


def _fusible_norm(logits_RC: Tensor, norm_R: Tensor) -> None:
    norm_R.copy_(torch.logaddexp(norm_R, logits_RC.logsumexp(1)))


def _fusible_clip(logits_RC: Tensor, norm_R: Tensor, norm_C: Tensor) -> Tensor:
    return logits_RC.copy_((logits_RC - norm_R[:, None]).exp() + (logits_RC - norm_C).exp())


def _fusible_siglip(logits_RC: Tensor, bias: Tensor, sums_2: Tensor, match: int) -> Tensor:
    row_R1 = torch.arange(logits_RC.shape[0], device=logits_RC.device)[:, None]
    column_C = torch.arange(logits_RC.shape[1], device=logits_RC.device)
    return siglip_weights_by_sign(logits_RC, bias, sums_2, column_C - row_R1 == match)


def siglip_weights_by_sign(logits_RC: Tensor, bias: Tensor, sums_2: Tensor, match_RC: Tensor) -> Tensor:
    """Does what `TileKernels.siglip_weights` does where any pairs may match, operation by operation."""
    sign_RC = torch.where(match_RC, -1.0, 1.0)
    cost_RC = sign_RC * (logits_RC + bias)
    weights_RC = sign_RC * cost_RC.sigmoid()
    sums_2.add_(torch.stack([-F.logsigmoid(-cost_RC).sum(), weights_RC.sum()]))
    return logits_RC.copy_(weights_RC)


def fused() -> TileKernels:
    """Returns the functions as torch compiles them, at their first call, for tiles of any shape."""
    if _THREADS not in os.environ:
        compile_in_this_process()  # a process for each core would be many for three functions

    def compiled(function: Callable[..., Any]) -> Any:
        return torch.compile(function, dynamic=True)

    return TileKernels(compiled(_fusible_norm), compiled(_fusible_clip), compiled(_fusible_siglip))


def kernels_for(settings: Model, device: torch.device, tiles: float) -> tuple[TileKernels, str]:
    """Returns the functions for a device, and a clause that says why they are what they are.

    `tiles` is the number of tiles into which a rank's logits are cut. Many are fused on a GPU on which
    torch.compile works: it is tried on a small tile, whose results must be those of the plain form.
    """
    if not is_cuda(device) or tiles < _MANY:
        return PLAIN, ""
    if settings.kernels == "plain":
        return PLAIN, 'not fused (model.kernels = "plain")'
    kernels = fused()
    problem = kernel_trial.lacking() or problem_of(kernels, device)
    return (PLAIN, f"not fused ({problem})") if problem else (kernels, "fused by torch.compile")


def problem_of(kernels: TileKernels, device: torch.device) -> str:
    """Returns, in words, what keeps `kernels` from giving the plain form's results; empty if nothing does."""
    return kernel_trial.problem_of("torch.compile", lambda: _difference(kernels, device))


def _difference(kernels: TileKernels, device: torch.device) -> str:
    generator = torch.Generator().manual_seed(0)
    logits_RC = (5 * torch.randn(24, 40, generator=generator)).to(device)
    results = [_results(form, logits_RC) for form in (kernels, PLAIN)]
    for name, one, other in zip(_NAMES, *results, strict=True):
        if not torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE):
            return f"{name} of torch.compile differ from the plain ones"
    return ""


_NAMES = ("weights of CLIP", "normalisers", "weights of SigLIP", "sums of SigLIP")


def _results(kernels: TileKernels, logits_RC: Tensor) -> tuple[Tensor, ...]:
    norm_R, norm_C = logits_RC.logsumexp(1), logits_RC.logsumexp(0)
    of_clip = kernels.clip_weights(logits_RC.clone(), norm_R, norm_C)
    kernels.add_to_norm(logits_RC.clone(), norm_R)
    sums_2 = logits_RC.new_zeros(2)
    of_siglip = kernels.siglip_weights(logits_RC.clone(), logits_RC.new_tensor(-1.0), sums_2, 3)
    return of_clip, norm_R, of_siglip, sums_2
