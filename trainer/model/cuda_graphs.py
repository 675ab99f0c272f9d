"""Replays both passes of the towers as CUDA graphs: one launch each, whatever the number of their kernels.

It is for steps so small that the GPU waits for the host. torch's `make_graphed_callables` captures a tower
for inputs of one shape, in memory of its own. Loss, reduction, clipping and update stay as they are, on every
number of ranks. A replay does what the capture did, so nothing may be captured that draws random numbers or
communicates.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from trainer.comm.accelerator import is_cuda
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.errors import InputError
from trainer.model.outputs import autocast, half_type
from trainer.model.sync_batch_norm import has_batch_norm

log = logging.getLogger("clipship")

_LOGITS = ("logit_scale", "logit_bias")
_RATES = ("p", "drop_prob", "prob", "dropout", "attn_drop")
"""Names under which modules keep the rate at which they drop something."""
_WARM_UP = 3


class _Tower(nn.Module):
    """A tower as a function of one tensor, with the parameters that are trained as its own."""

    def __init__(self, encode: Callable[..., Tensor], trained: list[nn.Parameter], job: Job) -> None:
        super().__init__()
        self._encode, self._precision = encode, job.model.precision
        self.trained = nn.ParameterList(trained)

    def forward(self, x: Tensor) -> Tensor:
        with autocast(x.device, self._precision, cache_enabled=False):  # a cached weight would stay for ever
            return self._encode(x, normalize=True)


def graph_towers(model: nn.Module, job: Job, plan: BatchPlan, device: torch.device) -> None:
    """Captures the passes of the model's trained towers and lets training replay them, if the job asks so.

    Evaluation, and inputs of another shape, run as before. Parameters must stay where they are in memory.
    Raises InputError for a model that cannot be captured. Does nothing without a GPU.
    """
    if not job.model.cuda_graphs or not is_cuda(device):
        return
    if problems := list(_problems(model)):
        raise InputError(f"model.cuda_graphs: {job.model.name} {' and '.join(problems)}: set it to false")
    samples = _samples(model, job, plan, device)
    towers = {
        name: _Tower(getattr(model, name), trained, job)
        for name in samples
        if (trained := _trained(model, image=name == "encode_image"))
    }
    with torch.autocast(device.type, enabled=False):
        torch.cuda.make_graphed_callables(
            tuple(towers.values()),
            tuple((samples[name],) for name in towers),
            num_warmup_iters=_WARM_UP,
            allow_unused_input=True,
        )
    _accept_streams()
    for name, tower in towers.items():
        vars(model)[name] = _replayed(model, tower, getattr(model, name), samples[name].shape)
    log.info("%-12s both passes of %s", "CUDA graphs", " and ".join(towers))


def _replayed(
    model: nn.Module, tower: nn.Module, encode: Callable[..., Tensor], shape: torch.Size
) -> Callable[..., Tensor]:
    def replay(x: Tensor, normalize: bool = False) -> Tensor:
        captured = model.training and torch.is_grad_enabled() and normalize and x.shape == shape
        features: Tensor = tower(x) if captured else encode(x, normalize=normalize)
        return features

    return replay


def _problems(model: nn.Module) -> Iterator[str]:
    """Yields what keeps the model from being captured, as clauses that follow its name."""
    if has_batch_norm(model):
        yield "has batch norm, which communicates"
    if any(_rate(module) > 0 for module in model.modules()):
        yield "drops values or patches at random"


def _rate(module: nn.Module) -> float:
    rates = (vars(module).get(name) for name in _RATES)
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def _samples(model: Any, job: Job, plan: BatchPlan, device: torch.device) -> dict[str, Tensor]:
    """Returns an input of each tower, as a step gives them."""
    n, (height, width) = plan.micro_batch_size, to_2tuple(model.visual.image_size)
    kind = half_type(job.model.precision) or next(model.parameters()).dtype
    return {
        "encode_image": torch.zeros(n, 3, height, width, dtype=kind, device=device),
        "encode_text": torch.zeros(n, model.context_length, dtype=torch.int64, device=device),
    }


def _trained(model: nn.Module, *, image: bool) -> list[nn.Parameter]:
    """Returns the trained parameters of a tower; all that is no image tower's counts as the text tower's."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in _LOGITS and name.startswith("visual.") == image
    ]


def _accept_streams() -> None:
    """Keeps torch from warning that gradients are added up on the stream on which they were captured."""
    accept = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if accept is not None:  # torch before 2.10 does not warn
        accept(False)
