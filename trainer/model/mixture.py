"""Mixture of trained weights with those of the run's begin, for evaluations (WiSE-FT, arXiv 2109.01903)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.checkpoint.identity import digest_of
from trainer.config import Job
from trainer.model.anchor import FirstWeights


class Mixture:
    """Puts a mixture in the place of the weights; what is locked, and batch norm's statistics, stay.

    The trained weights are kept in the host's memory meanwhile. Of LoRA's two matrices B alone is mixed,
    which makes the mixture that of their product.
    """

    def __init__(self, first: FirstWeights, share: float | None) -> None:
        """`share` is that of the trained weights; None: no mixture."""
        self._share = share
        self._first = {} if share is None else first

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[bool]:
        """Mixes for the block, which gets whether there is a mixture; the weights then have their bits again.

        Nothing else may read or change the weights meanwhile.
        """
        trained = [(parameter, _on_host(parameter)) for parameter in self._first]
        for parameter, first in self._first.items():
            parameter.copy_(first.to(parameter.device).lerp(parameter, self._share or 0.0))
        try:
            yield self._share is not None
        finally:
            for parameter, value in trained:
                parameter.copy_(value)


def digest_of_begin(job: Job, model: nn.Module) -> dict[str, str]:
    """Returns a digest of the first weights, if they are kept, by the key that names them."""
    if not job.keeps_first_weights:
        return {}
    sums = [(name, int(_bits(parameter).sum())) for name, parameter in model.named_parameters()]
    return {"model.init" if job.model.init else "model.pretrained": digest_of(sums)}


def _bits(parameter: Tensor) -> Tensor:
    types = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return parameter.detach().contiguous().view(types[parameter.itemsize])


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
