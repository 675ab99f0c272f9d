"""One optimizer step: from a rank's share of the global batch to updated parameters.

The result is the same on any number of ranks.

With accumulation the gradient is still that of the whole contrastive batch (arXiv 2101.06983): all
micro-batches pass forward once without a graph, the loss gives the gradient of their features, then each
micro-batch passes again with its graph to carry that gradient back. Randomness inside the model is seeded by
sample (`sample_dropout.py`), so that the second pass repeats the first, a resumed run repeats the
uninterrupted one, and the number of ranks changes nothing.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from open_clip.coca_model import CoCa
from torch import Tensor, nn

from trainer.comm.protocol import Comm, Reducer
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.data.order import position_seed
from trainer.errors import InputError
from trainer.model.build import clamp_logit_scale, features, trained_towers
from trainer.model.catalog import NO_LOSS
from trainer.model.rank_loss import RankLoss
from trainer.model.sample_dropout import draw_by_sample
from trainer.model.sync_batch_norm import RunningStatistics

Features = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass, on the device."""

    images: Tensor
    """Pixels, [B, 3, height, width]."""
    tokens: Tensor
    """Token ids, int64 [B, context length]."""
    keys: Sequence[str] = ()
    """Names of the samples in their source."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, for the log."""

    loss_share: Tensor
    """Scalar: this rank's share of the global batch's loss; the shares sum to the loss."""
    grad_norm: Tensor
    """Scalar: norm of the whole gradient before clipping, the same on all ranks."""
    finite: bool = True
    """True if the gradient's norm is finite, the same on all ranks. If not, the model stays as it was."""
    scaled: bool = False
    """True if a GradScaler multiplied the loss; its search for a factor makes some steps infinite."""


class TrainStep:
    """Runs optimizer steps; call it once per global batch. Collective."""

    def __init__(
        self, job: Job, plan: BatchPlan, comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Raises InputError for a model that no loss here trains."""
        if isinstance(model, CoCa):
            raise InputError(f"model.name: {job.model.name} {NO_LOSS}")
        self.model, self.optimizer = model, optimizer
        self._job, self._plan, self._comm = job, plan, comm
        self._loss = RankLoss(job, comm)
        self._trained = trained_towers(model)
        self._keys = draw_by_sample(model)
        self._statistics = RunningStatistics(model)
        self._reducer: Reducer = comm.reducer(model)
        self.scaler = torch.amp.GradScaler(comm.device.type, enabled=job.model.precision == "fp16")

    def __call__(self, batches: Sequence[MicroBatch], step: int) -> StepResult:
        """Runs global batch `step` (from 0) with this rank's micro-batches, in order."""
        statistics = self._statistics.copy()
        loss_share = self.gradients(batches, step)
        self.scaler.unscale_(self.optimizer)
        limit = self._job.optim.grad_clip_norm or float("inf")
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        finite = bool(torch.isfinite(grad_norm))  # every rank has the same gradient, so all agree
        if finite:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            # Clipping has divided the gradient by this norm, and the forward pass has changed the batch norm
            # statistics.
            _back_off(self.scaler)
            self._statistics.put_back(statistics)
        clamp_logit_scale(self.model, self._job.optim.logit_scale_limit)
        return StepResult(loss_share, grad_norm, finite, self.scaler.is_enabled())

    def gradients(self, batches: Sequence[MicroBatch], step: int) -> Tensor:
        """Computes the gradient of the global batch's loss, times the scaler's factor, into every `grad`.

        Returns this rank's share of the loss.
        """
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
        parts = zip(*[(image, text) for image, text, _, _ in cached], strict=True)
        leaves = [
            torch.cat(tower).requires_grad_(trained)
            for tower, trained in zip(parts, self._trained, strict=True)
        ]
        logits = [tensor.detach().clone().requires_grad_() for tensor in cached[0][2:] if tensor is not None]
        share = self._loss_share((leaves[0], leaves[1], logits[0], logits[1] if len(logits) > 1 else None))
        self._backward_of(share)
        wanted = [
            [None] * len(batches) if leaf.grad is None else leaf.grad.split(self._plan.micro_batch_size)
            for leaf in leaves
        ]
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            # Logit scale and bias belong to no micro-batch; the last one, whose gradients are reduced,
            # carries theirs.
            logit_grads = [leaf.grad if last else torch.zeros_like(leaf) for leaf in logits]
            with nullcontext() if last else self._reducer.accumulate():
                out = self._forward(self._reducer.module, batch, step, number)
                _carry(out, [wanted[0][number], wanted[1][number], *logit_grads])
        return share.detach()

    def _forward(self, module: nn.Module, batch: MicroBatch, step: int, number: int) -> Features:
        first = self._comm.world.rank * self._plan.batch_size_per_rank + number * self._plan.micro_batch_size
        # This seeds the randomness that `sample_dropout.py` cannot reach.
        torch.manual_seed(position_seed(self._job.seed, step, first, "model"))
        positions = range(first, first + len(batch.images))
        self._keys.keys_B = torch.tensor(
            [position_seed(self._job.seed, step, position, "dropout") for position in positions]
        )
        return features(module, batch.images, batch.tokens, self._job.model.precision)

    def _loss_share(self, out: Features) -> Tensor:
        return self._loss(*out)

    def _backward_of(self, share: Tensor) -> None:
        # Reducers average over the ranks, but shares add up: hence the factor, the number of ranks.
        self.scaler.scale(share * self._comm.world.size).backward()


def _back_off(scaler: torch.amp.GradScaler) -> None:
    """Lowers the scaler's factor by one step, for an optimizer step that is left out.

    The scaler itself checks single elements; elements that are all finite can have a norm that float32 cannot
    hold.
    """
    if scaler.is_enabled():
        scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": 0})


def _carry(out: Features, grads: Sequence[Tensor | None]) -> None:
    """Runs the backward pass from features and logit parameters with known gradients.

    Locked towers have no graph.
    """
    pairs = [
        (tensor, grad)
        for tensor, grad in zip([t for t in out if t is not None], grads, strict=True)
        if tensor.requires_grad
    ]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
