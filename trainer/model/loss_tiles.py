"""The contrastive losses in tiles: logits are computed block by block, twice if need be, and never kept.

The letters are those of `loss.py`, whose plain forms are the oracle of these. Each function computes the loss
and its gradient in one go and drops all that is large before the backward pass begins; that one only
multiplies, and communicates nothing.

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

SigLIP has a term for each pair and no normaliser. The texts go round the ring of ranks (arXiv 2303.15343,
section 3.3), their gradient with them, and each rank adds the pairs with its own images. No rank holds more
than n rows of another one, and one look at the logits is enough.

The gradient of s needs no sum of its own: it is sum_i <x_i, d loss / d x_i> / s.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.comm.protocol import Comm
from trainer.model.gpu_math import products_in_tf32
from trainer.model.loss import needed_bias
from trainer.model.positives import Positives
from trainer.model.tile_kernels import PLAIN, TileKernels, siglip_weights_by_sign

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

    If only the text tower is trained, images go round the ring, without a gradient; the share is then that of
    this rank's texts. Raises ValueError if the model has no logit bias. Collective.
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
    own, other, own_norm_n, other_norm_n, match_n = _gathered_and_normalised(task)
    target_n = 2 * (1 - task.tiles.smoothing) * match_n
    if task.tiles.smoothing:
        target_n += _mean_logits(task, task.own_nD, other) + _mean_logits(task, task.other_nD, own)
    share = (own_norm_n + other_norm_n - target_n).sum() / (2 * task.total)
    if not task.graded:
        return _Known(share)
    norms_N2 = task.comm.all_gather(torch.stack([own_norm_n, other_norm_n], 1))
    own_norm_N, other_norm_N = norms_N2.T.contiguous().unbind()
    if not task.other_graded:
        del own
        own_grad_nD = torch.empty_like(task.own_nD)
        _gradient(task, task.own_nD, other, own_norm_n, other_norm_N, own_grad_nD)
        return _Known(share, own_grad_nD)
    _gradient(task, task.own_nD, other, own_norm_n, other_norm_N, own.spare)
    del other
    other_grad_nD = torch.empty_like(task.other_nD)
    _gradient(task, task.other_nD, own, other_norm_n, own_norm_N, other_grad_nD)
    return _Known(share, own.pop_spare(), other_grad_nD)


def _gathered_and_normalised(task: _Task) -> tuple["_Gathered", "_Gathered", Tensor, Tensor, Tensor]:
    """Returns the rows of all ranks, own and other; the normalisers of both; the logits of the matches.

    Images, which the model has first, are gathered first. The texts of all ranks arrive while this rank's
    are compared with the images.
    """
    image_nD, text_nD = (task.other_nD, task.own_nD) if task.swapped else (task.own_nD, task.other_nD)
    images = _Gathered(task.comm, image_nD, task.images)
    texts_ND = None if task.comm.world.size == 1 else task.comm.start_all_gather(text_nD)
    text_norm_n, of_text_n = _normalisers(task, text_nD, images)
    texts = _Gathered(task.comm, text_nD, texts_ND)
    image_norm_n, of_image_n = _normalisers(task, image_nD, texts)
    if task.swapped:
        return texts, images, text_norm_n, image_norm_n, of_text_n
    return images, texts, image_norm_n, text_norm_n, of_image_n


class _Gathered:
    """All ranks' rows of one modality. The gathered copy of this rank's rows is spare: the rows are at hand.

    A gradient of this rank is built in it, so that it takes no more memory. Collective.
    """

    def __init__(self, comm: Comm, own_nD: Tensor, started: Gathered | None) -> None:
        self._own_nD, self._alone = own_nD, comm.world.size == 1
        self._first = comm.world.rank * len(own_nD)
        if self._alone:
            self._all_ND = torch.empty_like(own_nD)
        else:
            self._all_ND = comm.all_gather(own_nD) if started is None else started()

    @property
    def spare(self) -> Tensor:
        """Memory of n x D values with any content."""
        return self._all_ND[self._first : self._first + len(self._own_nD)]

    def pop_spare(self) -> Tensor:
        """Returns the content of the spare memory, and drops the other rows."""
        spare_nD = self.spare if self._alone else self.spare.clone()
        del self._all_ND
        return spare_nD

    def blocks(self, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yields all rows in blocks of at most `rows`, each with the place of its first row among all."""
        end = self._first + len(self._own_nD)
        for start, part in (
            (0, self._all_ND[: self._first]),
            (self._first, self._own_nD),
            (end, self._all_ND[end:]),
        ):
            for offset in range(0, len(part), rows):
                yield start + offset, part[offset : offset + rows]


def _normalisers(task: _Task, own_nD: Tensor, others: _Gathered) -> tuple[Tensor, Tensor]:
    """Returns the log-sum-exp of the logits of each own row, and its logit with its match, both [n].

    Of several matches it is the mean.
    """
    norm_n = own_nD.new_full((len(own_nD),), -torch.inf)
    match_n = own_nD.new_zeros(len(own_nD))
    for row, rows_RD in _blocks(task, own_nD):
        norm_R = norm_n[row : row + len(rows_RD)]
        for column, columns_CD in others.blocks(task.columns):
            logits_RC = rows_RD @ columns_CD.T
            if task.positives is not None:
                target_RC = task.positives.target(task.first + row, column, logits_RC)
                match_n[row : row + len(rows_RD)] += target_RC.mul_(logits_RC).sum(1)
            elif (matches := _matches(logits_RC, task.first + row, column)) is not None:
                place = max(column - task.first, row)
                match_n[place : place + len(matches)] = matches
            task.tiles.kernels.add_to_norm(logits_RC, norm_R)
    return norm_n, match_n


def _gradient(
    task: _Task, own_nD: Tensor, others: _Gathered, own_norm_n: Tensor, other_norm_N: Tensor, out_nD: Tensor
) -> None:
    """Writes the gradient of the whole loss for this rank's rows to `out_nD`."""
    out_nD.zero_()
    for row, rows_RD in _blocks(task, own_nD):
        here = slice(row, row + len(rows_RD))
        for column, columns_CD in others.blocks(task.columns):
            logits_RC = rows_RD @ columns_CD.T
            there = slice(column, column + len(columns_CD))
            weights_RC = task.tiles.kernels.clip_weights(logits_RC, own_norm_n[here], other_norm_N[there])
            if task.positives is not None:
                target_RC = task.positives.target(task.first + row, column, weights_RC)
                weights_RC.sub_(target_RC, alpha=2 * (1 - task.tiles.smoothing))
            elif (matches := _matches(weights_RC, task.first + row, column)) is not None:
                matches.sub_(2 * (1 - task.tiles.smoothing))
            out_nD[here].addmm_(weights_RC, columns_CD)
    if task.tiles.smoothing:
        out_nD.sub_(_mean_row(task, others), alpha=2 * task.tiles.smoothing)
    out_nD.mul_(task.scale / (2 * task.total))


def _mean_row(task: _Task, others: _Gathered) -> Tensor:
    """Returns the mean of all ranks' rows, [D]."""
    sums = [part_CD.sum(0) for _, part_CD in others.blocks(task.columns)]
    return torch.stack(sums).sum(0) / task.total


def _mean_logits(task: _Task, own_nD: Tensor, others: _Gathered) -> Tensor:
    """Returns the mean of each own row's logits, times the share that is smoothed, [n]."""
    return task.tiles.smoothing * task.scale * (own_nD @ _mean_row(task, others))


def _siglip(task: _Task) -> _Known:
    comm, size = task.comm, task.comm.world.size
    own_grad_nD = torch.zeros_like(task.own_nD) if task.graded else None
    guest_nD, guest_grad_nD = task.other_nD, torch.zeros_like(task.other_nD) if task.other_graded else None
    sums = task.own_nD.new_zeros(2)  # of the losses of all pairs, and of their gradients
    for stop in range(size):
        if stop:
            guest_nD = comm.shift(guest_nD)
            guest_grad_nD = None if guest_grad_nD is None else comm.shift(guest_grad_nD)
        guest = (comm.world.rank - stop) % size
        _add_pairs(task, guest_nD, guest * len(guest_nD), sums, own_grad_nD, guest_grad_nD)
    del guest_nD
    if guest_grad_nD is not None and size > 1:
        guest_grad_nD = comm.shift(guest_grad_nD)  # home
    for gradient in (own_grad_nD, guest_grad_nD):
        if gradient is not None:
            gradient.mul_(task.scale / task.total)
    share, bias_grad = sums.div_(task.total).unbind()
    return _Known(share.clone(), own_grad_nD, guest_grad_nD, bias_grad.clone())


def _add_pairs(
    task: _Task,
    guest_nD: Tensor,
    guest: int,
    sums_2: Tensor,
    own_grad_nD: Tensor | None,
    guest_grad_nD: Tensor | None,
) -> None:
    """Adds the pairs of own rows and a guest's rows to the sums and gradients, which lack the factors.

    `guest` is the place of the guest's first row among all. The sums are those of the pairs' losses and of
    their gradients.
    """
    assert task.bias is not None
    bias, kernels = task.bias.detach(), task.tiles.kernels
    for row, rows_RD in _blocks(task, task.own_nD):
        for column in range(0, len(guest_nD), task.columns):
            columns_CD = guest_nD[column : column + task.columns]
            logits_RC = rows_RD @ columns_CD.T
            if task.positives is None:
                match = row - column if guest == task.first else len(columns_CD)  # beyond the last: none
                weights_RC = kernels.siglip_weights(logits_RC, bias, sums_2, match)
            else:
                same_RC = task.positives.same(task.first + row, guest + column, logits_RC)
                weights_RC = siglip_weights_by_sign(logits_RC, bias, sums_2, same_RC)
            if own_grad_nD is None:
                continue
            own_grad_nD[row : row + len(rows_RD)].addmm_(weights_RC, columns_CD)
            if guest_grad_nD is not None:
                own_RD = task.own_nD[row : row + len(rows_RD)]
                guest_grad_nD[column : column + len(columns_CD)].addmm_(weights_RC.T, own_RD)


def _blocks(task: _Task, own_nD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields own rows times the scale, in blocks, each with the place of its first row on this rank."""
    for row in range(0, len(own_nD), task.rows):
        yield row, task.scale * own_nD[row : row + task.rows]


def _matches(tile_RC: Tensor, row: int, column: int) -> Tensor | None:
    """Returns a view of the pairs (i, i) in a tile with this first row and column; None if it has none."""
    first = max(row, column)
    last = min(row + tile_RC.shape[0], column + tile_RC.shape[1])
    return (
        tile_RC[first - row : last - row, first - column : last - column].diagonal() if first < last else None
    )


def _dot(one_nD: Tensor, two_nD: Tensor, rows: int) -> Tensor:
    """Returns the sum of all products, without a third tensor of that size."""
    pairs = zip(one_nD.split(rows), two_nD.split(rows), strict=True)
    return torch.stack([(one * two).sum() for one, two in pairs]).sum()
