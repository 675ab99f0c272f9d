"""The loss as a rank computes it: in tiles, or plain where teachers judge whole rows."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.comm.accelerator import is_cuda
from trainer.comm.autograd import gather_with_grad
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.losses import LOSSES, TILE, in_tf32
from trainer.model.loss import SHARES
from trainer.model.loss_tiles import TILED_SHARES, Gathered, Tiles
from trainer.model.positives import Positives
from trainer.model.teacher import DISTILLED, Judgement
from trainer.model.tile_kernels import PLAIN, kernels_for
from trainer.text.wording import many

log = logging.getLogger("clipship")


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
