"""The loss as a rank computes it: plain or in tiles, whichever the job or the memory asks for."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.comm.accelerator import is_cuda, memory_bytes, on_accelerator
from trainer.comm.autograd import gather_with_grad
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.loss_tile import in_tf32, plain_bytes, spares_network, tile_rows, tile_text
from trainer.config.losses import LOSSES
from trainer.model.loss import SHARES
from trainer.model.loss_tiles import TILED_SHARES, Gathered, Tiles
from trainer.model.positives import Positives
from trainer.model.teacher import DISTILLED, Judgement
from trainer.model.tile_kernels import PLAIN, kernels_for
from trainer.sysinfo.memory import host_bytes

log = logging.getLogger("clipship")


class RankLoss:
    """Computes this rank's share of the job's contrastive loss. Collective, and so is its construction."""

    def __init__(self, job: Job, comm: Comm) -> None:
        self._name, self._setting, self._comm = LOSSES[job.optim.loss].contrast, job.loss_tile, comm
        self._smoothing = job.optim.label_smoothing
        self._distilled = job.optim.distill_weight if job.model.judged_by is not None else None
        self._temperature = job.optim.distill_temperature
        self._model, self._labelled = job.model, job.optim.labelled
        # The forms communicate differently, so all ranks must choose by the same numbers.
        self._memory, self._nodes = _smallest_memory(comm)
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
        tiles = self._tiles = self._tiles or self._choose(image_nD)
        images, self._images = self._images, None
        alone = self._comm.world.size == 1
        positives = (
            groups if groups is None else Positives(groups if alone else self._comm.all_gather(groups))
        )
        if tiles.rows:
            return TILED_SHARES[self._name](
                self._comm, image_nD, text_nD, scale, bias, tiles, images, positives
            )

        gathered: list[tuple[Tensor, Tensor]] = []

        def gather(features_nD: Tensor) -> Tensor:
            for own_nD, all_ND in gathered:
                if own_nD is features_nD:
                    return all_ND
            started = images if features_nD is image_nD else None
            gathered.append((features_nD, gather_with_grad(self._comm, features_nD, started)))
            return gathered[-1][1]

        first = self._comm.world.rank * len(image_nD)
        share = SHARES[self._name](image_nD, text_nD, scale, bias, gather, first, self._smoothing, positives)
        if self._distilled is None or not judgements:
            return share
        distilled = [
            DISTILLED[self._name](image_nD, text_nD, scale, bias, each, gather, self._temperature)
            for each in judgements
        ]
        return share + self._distilled * torch.stack(distilled).mean()

    def _choose(self, image_nD: Tensor) -> Tiles:
        n, width = image_nD.shape
        plain = plain_bytes(
            n, n * self._comm.world.size, width, image_nD.element_size(), labelled=self._labelled
        )
        spares = spares_network(self._name, self._nodes)
        rows = tile_rows(self._setting, plain, self._memory, spares=spares)
        if not rows:
            return Tiles(0)
        kernels, clause = kernels_for(self._model, self._comm.device)
        tf32 = is_cuda(self._comm.device) and in_tf32(self._model.precision, self._model.kernels)
        clauses = [tile_text(self._setting, rows, plain, self._memory, self._nodes), clause]
        clauses += ["products in TF32"] * tf32
        clauses += ["labels of positives not fused"] * (self._labelled and kernels is not PLAIN)
        log.info("%-12s %s", "loss", ", ".join(filter(None, clauses)))
        return Tiles(rows, kernels, tf32, self._smoothing)


def _smallest_memory(comm: Comm) -> tuple[int, int]:
    """Collective: returns the bytes that the rank with the least memory has, and the number of nodes.

    On a GPU they are the GPU's; elsewhere the ranks of a node share the node's.
    """
    on_gpu = on_accelerator(comm.device)
    own = memory_bytes(comm.device) if on_gpu else host_bytes()
    everybody = comm.all_gather_object((comm.world.node, own))
    nodes = [node for node, _ in everybody]
    least = min(int(size) // (1 if on_gpu else nodes.count(node)) for node, size in everybody)
    return least, len(set(nodes))
