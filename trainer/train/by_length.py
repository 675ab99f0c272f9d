"""Cuts a step's samples into micro-batches of captions of like length.

The samples of a rank in a step, and so the step's gradient, stay what they were; only which of them pass
together follows from their captions. Each micro-batch is then cut behind its own longest caption, and few
short ones pass beside a long one.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.model.caption_length import CaptionLength
from trainer.text.wording import many

log = logging.getLogger("clipship")
_WORTH = 0.05
"""Share of the text tower's tokens that has to be spared: samples that change place are copied."""
_TOLD_AFTER = 10
"""Steps after which the log says what was spared."""


class ByLength:
    """Decides the order of the samples of each step, and counts the tokens that it spares."""

    def __init__(self, rule: CaptionLength, tells: bool) -> None:
        """`tells` says whether this process logs what was spared."""
        self._rule, self._tells = rule, tells
        self._steps = self._loaded = self._left = 0

    def order(self, tokens: Sequence[Tensor]) -> Tensor | None:
        """Returns the places of a step's samples in a better order, int64; None to leave them as they are.

        `tokens` are those of the micro-batches, of equal size, int64 [B, L] on the host.
        """
        if len(tokens) == 1:
            return None
        whole = torch.cat(list(tokens))
        order = self._rule.needed(whole).argsort(stable=True)
        loaded, sorted_ = (
            sum(map(self._rule, parts)) for parts in (tokens, whole[order].split(len(tokens[0])))
        )
        worth = loaded - sorted_ > _WORTH * loaded
        self._count(loaded, sorted_ if worth else loaded)
        return order if worth else None

    def _count(self, loaded: int, left: int) -> None:
        self._steps, self._loaded, self._left = self._steps + 1, self._loaded + loaded, self._left + left
        if self._steps == _TOLD_AFTER and self._tells and self._left < self._loaded:
            log.info(
                "%-12s micro-batches by caption length: %.0f %% fewer tokens in the text tower in %s",
                "captions",
                100 * (1 - self._left / self._loaded),
                many(self._steps, "step"),
            )
