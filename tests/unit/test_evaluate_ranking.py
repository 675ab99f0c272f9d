"""Ranks among images and texts: exact, ties by number, the same in any cut, never a matrix of all pairs."""

from collections.abc import Iterable

import torch

from trainer.evaluate.ranking import Pairs, ahead, exact


def last(counts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return list(counts)[-1]


def test_a_model_with_equal_features_for_everything_finds_nothing() -> None:
    for broken in (torch.ones(100, 8), torch.full((100, 8), torch.nan), torch.full((100, 8), torch.inf)):
        pairs = Pairs(exact(broken), exact(broken), torch.arange(100))
        of_texts, of_images = last(ahead(pairs, [0]))
        assert of_texts.tolist() == of_images.tolist() == list(range(100))
