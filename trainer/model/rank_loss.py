"""The loss as a rank computes it: in tiles, or plain where teachers judge whole rows.

In tiles, logits are computed block by block, twice if need be, and never kept. The letters are those of
`loss.py`, whose plain forms are the oracle of these. Each function computes the loss and its gradient in one
go and drops all that is large before the backward pass begins; that one only multiplies, and communicates
nothing.

CLIP, with z_ij = s <x_i, y_j> for image x_i and text y_j, r_i = log sum_j exp z_ij and
c_j = log sum_i exp z_ij:

    loss            = sum_i (r_i + c_i - 2 z_ii) / 2N
    d loss / d z_ij = (exp(z_ij - r_i) + exp(z_ij - c_j) - 2 [i = j]) / 2N

The gradient of x_i follows from all texts, r_i and every c_j; that of y_j from all images, c_j and every r_i.
So ranks gather the features once, without a graph, and then the normalisers r and c, 2 N values. Each then
computes the whole gradient of its own features from a second look at its logits: no gradient of N x D values
travels. The plain form has as many products: it computes its part of the gradient of all ranks' features.
Positives with equal captions take the place of [i = j], each by its share of the target.
With the share e of each target smoothed over all samples, 2 z_ii becomes 2 (1 - e) z_ii + 2 e mean_j z_ij:
what is added is a product with the sum of all rows, and no look at single logits.

SigLIP has a term for each pair and no normaliser, so one look at the logits is enough. Each rank gathers the
texts, adds the pairs with its own images, and gets the sum of all ranks' gradients of its own texts.

The gradient of s needs no sum of its own: it is sum_i <x_i, d loss / d x_i> / s.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.comm.accelerator import is_cuda
from trainer.comm.autograd import gather_with_grad
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.losses import LOSSES, TILE, in_tf32
from trainer.model.gpu_math import products_in_tf32
from trainer.model.loss import SHARES, needed_bias
from trainer.model.positives import Positives
from trainer.model.teacher import DISTILLED, Judgement
from trainer.model.tile_kernels import PLAIN, TileKernels, kernels_for, siglip_weights_by_sign
from trainer.text.wording import many

log = logging.getLogger("clipship")

Gathered = Callable[[], Tensor]
"""Waits for the images of all ranks, which `Comm.start_all_gather` has begun to gather: -> [N, D]."""
TiledShare = Callable[
    [Comm, Tensor, Tensor, Tensor, Tensor | None, "Tiles", Gathered | None, Positives | None], Tensor
]


@dataclass(frozen=True)
class Tiles:
    """Size of the tiles into which the logits are cut, and the functions that compute them."""

    rows: int
    """Most rows of a tile, which has at most the square of it in logits."""
    kernels: TileKernels = PLAIN
    tf32: bool = False
    """True if products on a GPU round their factors to TF32, as `precision = "tf32"` lets all do."""
    smoothing: float = 0.0
    """Share of a softmax's target that goes to all samples alike."""


def clip_share_in_tiles(
    comm: Comm,
    image_nD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    images: Gathered | None = None,
    positives: Positives | None = None,
) -> Tensor:
    """Returns what `loss.clip_share` returns, from tiles of logits. Collective.

    With `positives` that holds for the sum over the ranks: a rank's share has the targets of one of its
    modalities twice. A bias moves all logits of a softmax alike: it changes nothing, and its gradient is
    zero. Images are gathered here unless `images` brings them.
    """
    return _in_graph(_clip, comm, image_nD, text_nD, scale, bias, tiles, images, positives)


def siglip_share_in_tiles(
    comm: Comm,
    image_nD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    _images: Gathered | None = None,
    positives: Positives | None = None,
) -> Tensor:
    """Returns what `loss.siglip_share` returns, from tiles of logits.

    If only the text tower is trained, images are gathered, without a gradient; the share is then that of this
    rank's texts. Raises ValueError if the model has no logit bias. Collective.
    """
    return _in_graph(_siglip, comm, image_nD, text_nD, scale, needed_bias(bias), tiles, positives=positives)


TILED_SHARES: dict[str, TiledShare] = {"clip": clip_share_in_tiles, "siglip": siglip_share_in_tiles}


@dataclass(frozen=True)
class _Task:
    """A loss of two modalities, `own` and `other`, which may change places; tensors are without a graph."""

    comm: Comm
    own_nD: Tensor
    other_nD: Tensor
    scale: Tensor
    bias: Tensor | None
    tiles: Tiles
    graded: bool
    """True if the gradient of `own` and of the bias is wanted; that of the scale follows."""
    other_graded: bool
    swapped: bool
    """True if `own` are the texts."""
    images: Gathered | None
    positives: Positives | None

    @property
    def rows(self) -> int:
        """Most rows of a tile."""
        return self.tiles.rows

    @property
    def columns(self) -> int:
        """Most columns of a tile: the fewer rows a rank has, the more, so that tiles are not small."""
        return self.rows**2 // max(1, min(self.rows, len(self.own_nD)))

    @property
    def first(self) -> int:
        """Place of this rank's first sample among all."""
        return self.comm.world.rank * len(self.own_nD)

    @property
    def total(self) -> int:
        """Number of samples of all ranks."""
        return self.comm.world.size * len(self.own_nD)


@dataclass(frozen=True)
class _Known:
    """A rank's share of the loss, and its gradients as far as they are wanted."""

    share: Tensor
    own_nD: Tensor | None = None
    other_nD: Tensor | None = None
    bias: Tensor | None = None


class _Graph(torch.autograd.Function):
    """Puts a share whose gradients are known into the graph. Its backward pass can run once."""

    @staticmethod
    def forward(ctx: Any, known: _Known, gradients: list[Tensor | None], *_inputs: object) -> Tensor:
        ctx.gradients = gradients
        return known.share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the backward pass of a loss in tiles has run, and its gradient is gone")
        return None, None, *(None if gradient is None else gradient.mul_(grad) for gradient in gradients)


def _in_graph(
    form: Callable[[_Task], _Known],
    comm: Comm,
    image_nD: Tensor,
    text_nD: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    images: Gathered | None = None,
    positives: Positives | None = None,
) -> Tensor:
    inputs = [tensor for tensor in (image_nD, text_nD, scale, bias) if tensor is not None]
    graded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    image, text = image_nD.requires_grad, text_nD.requires_grad
    swapped = text and not image
    own_nD, other_nD = (text_nD, image_nD) if swapped else (image_nD, text_nD)
    with torch.no_grad(), products_in_tf32(tiles.tf32):
        both = graded and image and text
        known = form(
            _Task(comm, own_nD, other_nD, scale, bias, tiles, graded, both, swapped, images, positives)
        )
        if known.own_nD is None:
            return known.share
        scale_grad = _dot(known.own_nD, own_nD, tiles.rows) / scale
        bias_grad = torch.zeros_like(scale) if known.bias is None else known.bias
    features = [known.other_nD, known.own_nD] if swapped else [known.own_nD, known.other_nD]
    gradients = [*features, scale_grad, bias_grad][: len(inputs)]
    share: Tensor = _Graph.apply(known, gradients, *inputs)
    return share


def _clip(task: _Task) -> _Known:
    own_ND, other_ND, own_norm_n, other_norm_n, match_n = _gathered_and_normalised(task)
    target_n = 2 * (1 - task.tiles.smoothing) * match_n
    if task.tiles.smoothing:
        target_n += _mean_logits(task, task.own_nD, other_ND) + _mean_logits(task, task.other_nD, own_ND)
    share = (own_norm_n + other_norm_n - target_n).sum() / (2 * task.total)
    if not task.graded:
        return _Known(share)
    norms_N2 = _gathered(task, torch.stack([own_norm_n, other_norm_n], 1))
    own_norm_N, other_norm_N = norms_N2.T.contiguous().unbind()
    own_grad_nD = _gradient(task, task.own_nD, other_ND, own_norm_n, other_norm_N)
    if not task.other_graded:
        return _Known(share, own_grad_nD)
    del other_ND
    return _Known(share, own_grad_nD, _gradient(task, task.other_nD, own_ND, other_norm_n, own_norm_N))


def _gathered(task: _Task, own_nD: Tensor) -> Tensor:
    """Returns the rows of all ranks. Collective, but for a single rank, which gets the tensor itself."""
    return own_nD if task.comm.world.size == 1 else task.comm.all_gather(own_nD)


def _gathered_and_normalised(task: _Task) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the rows of all ranks, own and other; the normalisers of both; the logits of the matches.

    Images, which the model has first, are gathered first. The texts of all ranks arrive while this rank's
    are compared with the images.
    """
    image_nD, text_nD = (task.other_nD, task.own_nD) if task.swapped else (task.own_nD, task.other_nD)
    image_ND = _gathered(task, image_nD) if task.images is None else task.images()
    texts = None if task.comm.world.size == 1 else task.comm.start_all_gather(text_nD)
    text_norm_n, of_text_n = _normalisers(task, text_nD, image_ND)
    text_ND = text_nD if texts is None else texts()
    image_norm_n, of_image_n = _normalisers(task, image_nD, text_ND)
    if task.swapped:
        return text_ND, image_ND, text_norm_n, image_norm_n, of_text_n
    return image_ND, text_ND, image_norm_n, text_norm_n, of_image_n


def _normalisers(task: _Task, own_nD: Tensor, others_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp of the logits of each own row, and its logit with its match, both [n].

    Of several matches it is the mean.
    """
    norm_n = own_nD.new_full((len(own_nD),), -torch.inf)
    match_n = own_nD.new_zeros(len(own_nD))
    for rows, columns, logits_RC in _tiles(task, own_nD, others_ND):
        if task.positives is not None:
            target_RC = task.positives.target(task.first + rows.start, columns.start, logits_RC)
            match_n[rows] += target_RC.mul_(logits_RC).sum(1)
        else:
            diagonal = task.first + rows.start - columns.start
            matches = logits_RC.diagonal(diagonal)
            row = rows.start - min(0, diagonal)
            match_n[row : row + len(matches)] = matches
        task.tiles.kernels.add_to_norm(logits_RC, norm_n[rows])
    return norm_n, match_n


def _gradient(
    task: _Task, own_nD: Tensor, others_ND: Tensor, own_norm_n: Tensor, other_norm_N: Tensor
) -> Tensor:
    """Returns the gradient of the whole loss for this rank's rows, [n, D]."""
    grad_nD = torch.zeros_like(own_nD)
    matched = 2 * (1 - task.tiles.smoothing)
    for rows, columns, logits_RC in _tiles(task, own_nD, others_ND):
        weights_RC = task.tiles.kernels.clip_weights(logits_RC, own_norm_n[rows], other_norm_N[columns])
        if task.positives is not None:
            target_RC = task.positives.target(task.first + rows.start, columns.start, weights_RC)
            weights_RC.sub_(target_RC, alpha=matched)
        else:
            weights_RC.diagonal(task.first + rows.start - columns.start).sub_(matched)
        grad_nD[rows].addmm_(weights_RC, others_ND[columns])
    if task.tiles.smoothing:
        grad_nD.sub_(others_ND.mean(0), alpha=2 * task.tiles.smoothing)
    return grad_nD.mul_(task.scale / (2 * task.total))


def _mean_logits(task: _Task, own_nD: Tensor, others_ND: Tensor) -> Tensor:
    """Returns the mean of each own row's logits, times the share that is smoothed, [n]."""
    return task.tiles.smoothing * task.scale * (own_nD @ others_ND.mean(0))


def _siglip(task: _Task) -> _Known:
    assert task.bias is not None
    bias, kernels = task.bias.detach(), task.tiles.kernels
    other_ND = _gathered(task, task.other_nD)
    own_grad_nD = torch.zeros_like(task.own_nD) if task.graded else None
    other_grad_ND = torch.zeros_like(other_ND) if task.other_graded else None
    sums_2 = task.own_nD.new_zeros(2)  # of the losses of all pairs, and of their gradients
    for rows, columns, logits_RC in _tiles(task, task.own_nD, other_ND):
        if task.positives is None:
            diagonal = task.first + rows.start - columns.start
            weights_RC = kernels.siglip_weights(logits_RC, bias, sums_2, diagonal)
        else:
            same_RC = task.positives.same(task.first + rows.start, columns.start, logits_RC)
            weights_RC = siglip_weights_by_sign(logits_RC, bias, sums_2, same_RC)
        if own_grad_nD is not None:
            own_grad_nD[rows].addmm_(weights_RC, other_ND[columns])
        if other_grad_ND is not None:
            other_grad_ND[columns].addmm_(weights_RC.T, task.own_nD[rows])
    del other_ND
    if other_grad_ND is not None and task.comm.world.size > 1:
        other_grad_ND = task.comm.reduce_scatter(other_grad_ND)
    for gradient in (own_grad_nD, other_grad_ND):
        if gradient is not None:
            gradient.mul_(task.scale / task.total)
    share, bias_grad = sums_2.div_(task.total).unbind()
    return _Known(share.clone(), own_grad_nD, other_grad_ND, bias_grad.clone())


def _tiles(task: _Task, own_nD: Tensor, others_ND: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields all logits of this rank in tiles: rows among `own_nD`, columns among `others_ND`, values."""
    for row in range(0, len(own_nD), task.rows):
        rows = slice(row, row + task.rows)
        rows_RD = task.scale * own_nD[rows]
        for column in range(0, len(others_ND), task.columns):
            columns = slice(column, column + task.columns)
            yield rows, columns, rows_RD @ others_ND[columns].T


def _dot(one_nD: Tensor, two_nD: Tensor, rows: int) -> Tensor:
    """Returns the sum of all products, without a third tensor of that size."""
    pairs = zip(one_nD.split(rows), two_nD.split(rows), strict=True)
    return torch.stack([(one * two).sum() for one, two in pairs]).sum()


class RankLoss:
    """Computes this rank's share of the job's contrastive loss. Collective."""

    def __init__(self, job: Job, comm: Comm) -> None:
        self._name, self._comm = LOSSES[job.optim.loss].contrast, comm
        self._model, self._optim = job.model, job.optim
        self._tiles: Tiles | None = None
        self._images: Gathered | None = None

    def image_features_ready(self, image_nD: Tensor) -> None:
        """Starts to gather the images' features for the next call, beside what computes those of texts.

        SigLIP needs no images of other ranks. Collective: every rank calls it before the same call, or none.
        """
        if self._name == "clip" and self._comm.world.size > 1:
            self._images = self._comm.start_all_gather(image_nD)

    def __call__(
        self,
        image_nD: Tensor,
        text_nD: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        judgements: Sequence[Judgement] = (),
        groups: Tensor | None = None,
    ) -> Tensor:
        """Returns the share, a scalar with its graph; the shares of all ranks add up to the loss.

        `trainer.model.loss` says what the letters mean. Every rank has as many samples as this one.
        `judgements` are what the job's teachers make of them, `groups` the numbers of their groups.
        """
        images, self._images = self._images, None
        alone = self._comm.world.size == 1
        positives = (
            groups if groups is None else Positives(groups if alone else self._comm.all_gather(groups))
        )
        tiled = None if judgements else TILED_SHARES.get(self._name)
        if tiled is not None:
            tiles = self._tiles = self._tiles or self._tiling(len(image_nD))
            return tiled(self._comm, image_nD, text_nD, scale, bias, tiles, images, positives)

        gathered: list[tuple[Tensor, Tensor]] = []

        def gather(features_nD: Tensor) -> Tensor:
            for own_nD, all_ND in gathered:
                if own_nD is features_nD:
                    return all_ND
            started = images if features_nD is image_nD else None
            gathered.append((features_nD, gather_with_grad(self._comm, features_nD, started)))
            return gathered[-1][1]

        first, smoothing = self._comm.world.rank * len(image_nD), self._optim.label_smoothing
        share = SHARES[self._name](image_nD, text_nD, scale, bias, gather, first, smoothing, positives)
        if not judgements:
            return share
        distilled = [
            DISTILLED[self._name](
                image_nD, text_nD, scale, bias, each, gather, self._optim.distill_temperature
            )
            for each in judgements
        ]
        return share + self._optim.distill_weight * torch.stack(distilled).mean()

    def _tiling(self, n: int) -> Tiles:
        kernels, clause = kernels_for(self._model, self._comm.device, n * n * self._comm.world.size / TILE**2)
        tf32 = is_cuda(self._comm.device) and in_tf32(self._model.precision, self._model.kernels)
        clauses = [clause] if clause else []
        clauses += ["products in TF32"] * tf32
        clauses += ["labels of positives not fused"] * (self._optim.labelled and kernels is not PLAIN)
        if clauses:
            log.info("%-12s in tiles of %s, %s", "loss", many(TILE, "sample"), ", ".join(clauses))
        return Tiles(TILE, kernels, tf32, self._optim.label_smoothing)
