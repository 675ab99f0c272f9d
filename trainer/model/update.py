"""Update of the parameters that the device itself leaves out if the gradient is not finite.

The host decides nothing here if the optimizer is fused, so it need not wait for a GPU. A step that is left
out changes neither parameters nor the optimizer's state: the fused optimizer skips it, its step counts
included. Other optimizers are not called for such a step; the host waits until it knows whether it is one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.shards import Shards
from trainer.internals import found_inf, leaves_out_by_itself


def clip_gradients(shards: Shards, limit: float | None) -> Tensor:
    """Returns the norm of the whole gradient, a scalar, after scaling a larger gradient down to the limit.

    None sets no limit. Collective if the parameters are split over the ranks.
    """
    norm = shards.grad_norm()
    if limit is not None:
        parameters = [parameter for parameter in shards.parameters.values() if parameter.grad is not None]
        nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)
    return norm


def update_if(finite: Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Runs one step of the optimizer, which changes nothing if `finite` is false, a scalar on the device.

    The scaler's factor then falls by one step. The scaler has unscaled the gradients already.
    """
    skip = (~finite).to(torch.float32)
    if scaler.is_enabled():
        # The scaler checks single elements. Elements that are all finite can have a norm that float32 cannot
        # hold, and an element that is not makes the norm so.
        for mark in found_inf(scaler, optimizer):
            mark.copy_(skip)
        scaler.step(optimizer)
        scaler.update()
        return
    if not leaves_out_by_itself(optimizer):
        if finite:
            optimizer.step()
        return
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, skip  # as GradScaler tells a fused optimizer
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
