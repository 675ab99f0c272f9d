"""One optimizer step: from a rank's share of the global batch to updated parameters.

The result is the same on any number of ranks.

With accumulation the gradient is still that of the whole contrastive batch (arXiv 2101.06983): all
micro-batches pass forward once without a graph, the loss gives the gradient of their features, then each
micro-batch passes again with its graph to carry that gradient back. A loss of captions needs no other sample:
it joins in that second pass. Randomness inside the model is seeded by
sample (`sample_dropout.py`), so that the second pass repeats the first, a resumed run repeats the
uninterrupted one, and the number of ranks changes nothing.

The host never waits for a GPU here: the device finds out whether the gradient is finite, and leaves the
update out by itself if it is not.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trainer.comm.accelerator import seed_generators
from trainer.comm.host_memory import HostCopy
from trainer.comm.protocol import Comm, Reducer
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.config.losses import LOSSES
from trainer.data.order import position_seed
from trainer.errors import InputError
from trainer.internals import leaves_out_by_itself
from trainer.model.anchor import FirstWeights, first_weights, pull
from trainer.model.build import clamp_logit_scale, trained_towers
from trainer.model.captioning import caption_share, padding_id, writes_captions, written_tokens
from trainer.model.cuda_graphs import TowerGraphs, could_be_replayed
from trainer.model.ema import Ema
from trainer.model.layer_numbers import layers_of
from trainer.model.locking import locked_first
from trainer.model.optimizer import build_optimizer, clip_gradients, update_if
from trainer.model.outputs import Outputs, half_type, on_image_features, outputs
from trainer.model.packages import NOT_ITS_LOSS
from trainer.model.packed_captions import Packed
from trainer.model.rank_loss import RankLoss
from trainer.model.sample_dropout import draw_by_sample
from trainer.model.sync_batch_norm import RunningStatistics
from trainer.model.teacher import Judgement, Teacher, joined


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass, on the device."""

    images: Tensor
    """Images as the model takes them, [B, ...], or bytes as the loader gives them if there is `normalise`."""
    tokens: Tensor | Packed
    """Token ids: int64 [B, context length] or, where captions are cut, fewer; or packed captions."""
    keys: Sequence[str] = ()
    """Names of the samples in their source."""
    normalise: Callable[[Tensor], Tensor] | None = None
    """Function from `images` to what the model takes. Each pass calls it and keeps nothing: bytes take a
    quarter of the memory of floats or less.
    """
    places: Sequence[int] | None = None
    """Places of the samples in the rank's share of the batch; None: they follow those of the one before."""
    judgements: Sequence[Judgement] = ()
    """Judgements of the teachers that have stored theirs."""
    groups: Tensor | None = None
    """Number of each sample's group, int64 [B]; None if pairs alone are positives."""

    @property
    def rows(self) -> Tensor:
        """Token ids as rows, for who cannot take packed captions: none are packed then."""
        assert isinstance(self.tokens, Tensor)
        return self.tokens


@dataclass(frozen=True)
class StepResult:
    """Result of a step, for the log. Its tensors are on the device until `on_host` brings them."""

    loss_share: Tensor
    """Scalar: this rank's share of the global batch's loss; the shares sum to the loss."""
    grad_norm: Tensor
    """Scalar: norm of the whole gradient before clipping, the same on all ranks."""
    scaled: bool = False
    """True if a GradScaler multiplied the loss; its search for a factor makes some steps infinite."""

    @property
    def finite(self) -> bool:
        """True if the gradient's norm is finite, the same on all ranks. If not, the model stays as it was.

        Waits for the step if the tensors are on a GPU.
        """
        return math.isfinite(self.grad_norm)

    def on_host(self) -> Callable[[], "StepResult"]:
        """Starts to copy both values to the host; the returned function gives the result with them."""
        copy = HostCopy([self.loss_share, self.grad_norm])

        def read() -> StepResult:
            loss_share, grad_norm = copy.get()
            return replace(self, loss_share=loss_share, grad_norm=grad_norm)

        return read


class TrainStep:
    """Runs optimizer steps; call it once per global batch. Collective."""

    def __init__(
        self, job: Job, plan: BatchPlan, comm: Comm, model: nn.Module, teacher: Teacher | None = None
    ) -> None:
        """Makes the optimizer, too; `comm` may split the model's parameters over the ranks, in place.

        Raises InputError for a model that the loss does not fit, and for towers that cannot be locked as
        asked.
        """
        self._captions = LOSSES[job.optim.loss].captions
        if self._captions != writes_captions(model):
            raise InputError(f"model.name: {job.model.name} {NOT_ITS_LOSS[self._captions]}")
        self.model = model
        self._teacher = teacher
        self._job, self._plan, self._comm = job, plan, comm
        self._loss = RankLoss(job, comm)
        self._trained = trained_towers(model)
        self._keys = draw_by_sample(model)
        self._graphs = TowerGraphs(model, job, comm.device)
        self._statistics = RunningStatistics(model)
        self._locked_first = locked_first(model, job.model)
        layers = layers_of(model)
        self._reducer: Reducer = comm.reducer(model)
        self.shards = self._reducer.shards
        self.optimizer: torch.optim.Optimizer = build_optimizer(self.shards.parameters, job.optim, layers)
        self.waited_s = 0.0
        """Seconds in which the host may have waited for the GPU to reduce gradients, since the start."""
        waits = job.comm.find_unused_parameters or not leaves_out_by_itself(self.optimizer)
        self.would_replay = (
            not waits
            and plan.accumulation == 1
            and could_be_replayed(model, job, plan.world_size, comm.device)
        )
        """True if the job could ask for CUDA graphs and does not, and a step waits for nothing else."""
        self.first: FirstWeights = first_weights(self.shards.parameters, job)
        self.ema = Ema(self.optimizer, job.optim)
        self._void = False
        self.scaler = torch.amp.GradScaler(comm.device.type, enabled=job.model.precision == "fp16")

    def __call__(self, batches: Sequence[MicroBatch], step: int, *, void: bool = False) -> StepResult:
        """Runs global batch `step` (from 0) with this rank's micro-batches, in order and of equal size.

        If `void` is true on any rank, the gradient is NaN on all, and the model stays as it was.
        """
        self._void = void
        statistics = self._statistics.copy()
        loss_share = self.gradients(batches, step)
        self._statistics.average(self._comm)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self.shards, self._job.optim.grad_clip_norm)
        finite = torch.isfinite(grad_norm)  # every rank has the same gradient, so all agree
        update_if(finite, self.optimizer, self.scaler)
        pull(self.optimizer, self.first, finite)
        self._statistics.put_back_unless(finite, statistics)  # the forward pass has changed them
        clamp_logit_scale(self.model, self._job.optim.logit_scale_limit)
        self.ema.update(step + 1, finite)
        return StepResult(loss_share, grad_norm, self.scaler.is_enabled())

    def gradients(self, batches: Sequence[MicroBatch], step: int) -> Tensor:
        """Computes the gradient of the global batch's loss, times the scaler's factor, into every `grad`.

        Returns this rank's share of the loss.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self._graphs.capture()
        whole = self._at_once(batches[0], step) if len(batches) == 1 else self._accumulated(batches, step)
        began = time.perf_counter()
        self._reducer.finish()
        self.waited_s += time.perf_counter() - began
        if step < (self._job.model.unlock_after_step or 0):
            for name in self._locked_first:
                self.shards.parameters[name].grad = None
        return whole

    def _at_once(self, batch: MicroBatch, step: int) -> Tensor:
        total = self._tokens_to_write([batch])
        with on_image_features(self.model, self._loss.image_features_ready):
            out = self._forward(self._reducer.module, batch, step, 0)
        share = self._contrast(out, [batch])
        if total is not None:
            share = share + self._written_share(out, batch, total)
        with self._statistics.kept() if self._job.model.grad_checkpointing else nullcontext():
            self._scaled(share).backward()
        return share.detach()

    def _accumulated(self, batches: Sequence[MicroBatch], step: int) -> Tensor:
        total = self._tokens_to_write(batches)
        leaves, logits = self._leaves(batches, step)
        share = self._contrast(Outputs(*leaves, *logits), batches)
        self._scaled(share).backward()
        whole = share.detach()
        wanted = [
            [None] * len(batches) if leaf.grad is None else leaf.grad.split(len(batches[0].images))
            for leaf in leaves
        ]
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            # Logit scale and bias belong to no micro-batch; the last one, whose gradients are reduced,
            # carries theirs.
            logit_grads = [leaf.grad if last else torch.zeros_like(leaf) for leaf in logits]
            with nullcontext() if last else self._reducer.accumulate():
                out = self._forward(self._reducer.module, batch, step, number)
                carried = _carried(out, [wanted[0][number], wanted[1][number], *logit_grads])
                if total is not None:
                    written = self._written_share(out, batch, total)
                    carried.append((self._scaled(written), None))
                    whole = whole + written.detach()
                begins, gradients = zip(*carried, strict=True)
                torch.autograd.backward(begins, gradients)
        return whole

    def _leaves(self, batches: Sequence[MicroBatch], step: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the features of all micro-batches, and logit scale and bias; all have no graph yet.

        Features of a locked tower ask for no gradient.
        """
        with torch.no_grad():
            cached = [
                self._forward(self.model, batch, step, number)._replace(written=None)
                for number, batch in enumerate(batches)
            ]
        towers = zip(*[(out.image, out.text) for out in cached], strict=True)
        leaves = [
            torch.cat(parts).requires_grad_(trained)
            for parts, trained in zip(towers, self._trained, strict=True)
        ]
        scale_and_bias = (tensor for tensor in (cached[0].scale, cached[0].bias) if tensor is not None)
        logits = [tensor.detach().clone().requires_grad_() for tensor in scale_and_bias]
        return leaves, logits

    def _forward(self, module: nn.Module, batch: MicroBatch, step: int, number: int) -> Outputs:
        first = self._comm.world.rank * self._plan.batch_size_per_rank + number * len(batch.images)
        # This seeds the randomness that `sample_dropout.py` cannot reach.
        seed_generators(self._comm.device, position_seed(self._job.seed, step, first, "model"))
        positions: Iterable[int] = range(first, first + len(batch.images))
        if batch.places is not None:
            positions = (
                self._comm.world.rank * self._plan.batch_size_per_rank + place for place in batch.places
            )
        self._keys.put(
            (position_seed(self._job.seed, step, position, "dropout") for position in positions),
            self._comm.device,
        )
        return outputs(module, self._images(batch), batch.tokens, self._job.model.precision)

    def _images(self, batch: MicroBatch) -> Tensor:
        """Returns what the model takes.

        With half precision, the towers' first layers would cast images to it and keep the result; a tower
        that is given the result itself has the same values, and nobody keeps the longer ones.
        """
        images = batch.normalise(batch.images) if batch.normalise else batch.images
        half = half_type(self._job.model.precision)
        return images.to(half) if half is not None and images.dtype == torch.float32 else images

    def _judgements(self, batches: Sequence[MicroBatch]) -> list[Judgement]:
        """Returns what each teacher makes of the micro-batches, now or beforehand; none without one."""
        if self._teacher is not None:
            return [joined([self._teacher(self._images(batch), batch.rows) for batch in batches])]
        return [joined(parts) for parts in zip(*(batch.judgements for batch in batches), strict=True)]

    def _groups(self, batches: Sequence[MicroBatch]) -> Tensor | None:
        """Returns the group of each sample, of which all are positives; None if only pairs are."""
        if not self._job.optim.labelled:
            return None
        parts = [batch.groups for batch in batches]
        assert all(part is not None for part in parts), "the loader has numbered no groups"
        return torch.cat([part for part in parts if part is not None])

    def _contrast(self, out: Outputs, batches: Sequence[MicroBatch]) -> Tensor:
        judgements, groups = self._judgements(batches), self._groups(batches)
        share = self._loss(out.image, out.text, out.scale, out.bias, judgements, groups)
        return share * self._job.optim.contrast_weight if self._captions else share

    def _tokens_to_write(self, batches: Sequence[MicroBatch]) -> Tensor | None:
        """Collective: returns the tokens of all ranks that the model has to write; None if it writes none."""
        if not self._captions:
            return None
        return written_tokens(self._comm, [batch.rows for batch in batches], padding_id(self.model))

    def _written_share(self, out: Outputs, batch: MicroBatch, total: Tensor) -> Tensor:
        assert out.written is not None
        share = caption_share(out.written, batch.rows, padding_id(self.model), total)
        return share * self._job.optim.caption_weight

    def _scaled(self, share: Tensor) -> Tensor:
        """Returns where a backward pass begins.

        Reducers average over the ranks, but shares add up: hence the factor, the number of ranks.
        """
        return self.scaler.scale(share * (math.nan if self._void else self._comm.world.size))


def _carried(out: Outputs, grads: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
    """Returns features and logit parameters with their known gradients; locked towers have no graph."""
    known = [tensor for tensor in out[:4] if tensor is not None]
    return [pair for pair in zip(known, grads, strict=True) if pair[0].requires_grad]
