"""One optimizer step: from a rank's share of the global batch to updated parameters, the same on any number of ranks.

With accumulation the gradient is still that of the whole contrastive batch (arXiv 2101.06983): all micro-batches pass forward once without
a graph, the loss gives the gradient of their features, then each passes again with its graph to carry that gradient on.
Randomness inside the model is drawn by sample (`dropout.py`), so that the second pass repeats the first, a resumed run repeats the
uninterrupted one, and another number of ranks changes nothing.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from open_clip.coca_model import CoCa
from torch import Tensor, nn

from trainer.batch_norm import RunningStatistics
from trainer.comm.autograd import gather_with_grad
from trainer.comm.protocol import Comm, Reducer
from trainer.data.order import position_seed
from trainer.dropout import by_position
from trainer.errors import InputError
from trainer.inputs.models import NO_LOSS
from trainer.job import Job
from trainer.loss import SHARES, Gathered
from trainer.model import clamp_logit_scale, features
from trainer.plan import Plan

Features = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass' worth of samples, on the device."""

    images: Tensor
    """[B, 3, height, width]."""
    tokens: Tensor
    """int64 [B, context length]."""
    keys: Sequence[str] = ()
    """What the samples are called where they come from."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for the log."""

    loss_share: Tensor
    """Scalar: adds up over the ranks to the loss of the global batch."""
    grad_norm: Tensor
    """Scalar: norm of the whole gradient before clipping, the same on all ranks."""
    finite: bool = True
    """Whether it is a number; the model stays as it was where not. The same on all ranks."""
    scaled: bool = False
    """The loss had a scaler's factor, whose search for the largest that fits makes some steps infinite."""


class TrainStep:
    """Holds what a step works on; call it once per global batch. Collective."""

    def __init__(self, job: Job, plan: Plan, comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raises InputError for a model that no loss here trains."""
        if isinstance(model, CoCa):
            raise InputError(f"model.name: {job.model.name} {NO_LOSS}")
        self.model, self.optimizer = model, optimizer
        self._job, self._plan, self._comm = job, plan, comm
        self._share = SHARES[job.optim.loss]
        self._keys = by_position(model)
        self._statistics = RunningStatistics(model)
        self._reducer: Reducer = comm.reducer(model)
        self.scaler = torch.amp.GradScaler(comm.device.type, enabled=job.model.precision == "fp16")

    def __call__(self, batches: Sequence[MicroBatch], step: int) -> StepResult:
        """The rank's micro-batches of global batch `step` (from 0), in order."""
        statistics = self._statistics.copy()
        loss_share = self.gradients(batches, step)
        self.scaler.unscale_(self.optimizer)
        limit = self._job.optim.grad_clip_norm or float("inf")
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        finite = bool(torch.isfinite(grad_norm))  # every rank has the same gradient, so all answer alike
        if finite or self.scaler.is_enabled():  # the scaler looks for itself, skips the update, and takes a smaller factor
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if not finite:  # the forward pass has moved them
            self._statistics.put_back(statistics)
        clamp_logit_scale(self.model)
        return StepResult(loss_share, grad_norm, finite, self.scaler.is_enabled())

    def gradients(self, batches: Sequence[MicroBatch], step: int) -> Tensor:
        """Leaves the gradient of the global batch's loss, times the scaler's factor, in every `grad`; returns the rank's share of it."""
        self.optimizer.zero_grad(set_to_none=True)
        whole = self._at_once(batches[0], step) if len(batches) == 1 else self._accumulated(batches, step)
        self._reducer.finish()
        return whole

    def _at_once(self, batch: MicroBatch, step: int) -> Tensor:
        share = self._loss_share(self._forward(self._reducer.module, batch, step, 0))
        self._backward_of(share)
        return share.detach()

    def _accumulated(self, batches: Sequence[MicroBatch], step: int) -> Tensor:
        with torch.no_grad():
            cached = [self._forward(self.model, batch, step, number) for number, batch in enumerate(batches)]
        leaves = [torch.cat(parts).requires_grad_() for parts in zip(*[(image, text) for image, text, _, _ in cached], strict=True)]
        logits = [tensor.detach().clone().requires_grad_() for tensor in cached[0][2:] if tensor is not None]
        share = self._loss_share((leaves[0], leaves[1], logits[0], logits[1] if len(logits) > 1 else None))
        self._backward_of(share)
        wanted = [leaf.grad.split(self._plan.micro_batch_size) for leaf in leaves if leaf.grad is not None]
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            # Logit scale and bias belong to no micro-batch: the last one, whose pass is reduced, carries their gradient.
            logit_grads = [leaf.grad if last else torch.zeros_like(leaf) for leaf in logits]
            with nullcontext() if last else self._reducer.accumulate():
                out = self._forward(self._reducer.module, batch, step, number)
                _carry(out, [wanted[0][number], wanted[1][number], *logit_grads])
        return share.detach()

    def _forward(self, module: nn.Module, batch: MicroBatch, step: int, number: int) -> Features:
        first = self._comm.world.rank * self._plan.batch_size_per_rank + number * self._plan.micro_batch_size
        torch.manual_seed(position_seed(self._job.seed, step, first, "model"))  # for what `dropout.py` cannot reach
        places = range(first, first + len(batch.images))
        self._keys.keys_B = torch.tensor([position_seed(self._job.seed, step, place, "dropout") for place in places])
        return features(module, batch.images, batch.tokens, self._job.model.precision)

    def _loss_share(self, out: Features) -> Tensor:
        image, text, scale, bias = out
        gathered = [Gathered(own, gather_with_grad(self._comm, own)) for own in (image, text)]
        return self._share(gathered[0], gathered[1], scale, bias, self._comm.world.rank * len(image))

    def _backward_of(self, share: Tensor) -> None:
        # Reducers average over the ranks, and shares add up: hence the number of ranks.
        self.scaler.scale(share * self._comm.world.size).backward()


def _carry(out: Features, grads: Sequence[Tensor | None]) -> None:
    """Backward from features and logit parameters whose gradients are known; locked towers have no graph."""
    pairs = [(tensor, grad) for tensor, grad in zip([t for t in out if t is not None], grads, strict=True) if tensor.requires_grad]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
