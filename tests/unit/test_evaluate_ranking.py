"""Ranks among images and texts: exact, ties by number, the same in any cut, never a matrix of all pairs."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.sample import RawSample
from trainer.evaluate.evaluation import board
from trainer.evaluate.ranking import Pairs, ahead, exact

STEP = 2.0**-24


def brute_force(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Places from 0 in a stable sort of the whole matrix; in integers, so that nothing is rounded."""
    images, texts = ((rows.double() / STEP).long() for rows in (pairs.images_ND, pairs.texts_TD))
    cosines, owner = images @ texts.T, pairs.image_of_T
    text_places, image_places = (
        (-rows).argsort(dim=1, stable=True).argsort(dim=1) for rows in (cosines, cosines.T)
    )
    nearest_own = [int(places[owner == image].min()) for image, places in enumerate(text_places)]
    return nearest_own, image_places.gather(1, owner[:, None])[:, 0].tolist()


def make_pairs(captions: list[int], seed: int, alphabet: int) -> Pairs:
    """Images with so many captions each; few different vectors, so that many cosines are equal."""
    generator = torch.Generator().manual_seed(seed)
    vectors, image_of = torch.randn(alphabet, 5, generator=generator), torch.tensor(captions)
    image_of = torch.arange(len(captions)).repeat_interleave(image_of)
    drawn = torch.randint(alphabet, (len(captions) + len(image_of),), generator=generator)
    features = exact(vectors[drawn])
    return Pairs(features[: len(captions)], features[len(captions) :], image_of)


def last(counts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return list(counts)[-1]


@settings(max_examples=60, deadline=None)
@given(
    captions=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    alphabet=st.integers(1, 40),
    cut=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 7)),
)
def test_ranks_are_those_of_a_stable_sort_of_all_pairs_in_any_cut(
    captions: list[int], seed: int, alphabet: int, cut: tuple[int, int, int]
) -> None:
    world_size, rows, columns = cut
    pairs = make_pairs(captions, seed, alphabet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.evaluate.ranking.ROWS", rows)
        patch.setattr("trainer.evaluate.ranking.COLUMNS", columns)
        every = world_size * rows
        begins = [range(first, len(captions) + first, every) for first in range(0, every, rows)]
        shares = [last(ahead(pairs, own)) for own in begins]
    found = tuple(torch.stack(parts).sum(0).tolist() for parts in zip(*shares, strict=True))
    assert found == brute_force(pairs)


def test_exact_features_are_whole_steps_near_the_unit_vector() -> None:
    given = torch.randn(50, 512, generator=torch.Generator().manual_seed(1))
    steps = exact(given).double() / STEP
    assert torch.equal(steps, steps.round())
    unit = torch.nn.functional.normalize(given.double(), dim=1)
    assert float((steps * STEP - unit).abs().max()) <= STEP / 2


def test_a_model_with_equal_features_for_everything_finds_nothing() -> None:
    for broken in (torch.ones(100, 8), torch.full((100, 8), torch.nan), torch.full((100, 8), torch.inf)):
        pairs = Pairs(exact(broken), exact(broken), torch.arange(100))
        of_texts, of_images = last(ahead(pairs, [0]))
        assert of_texts.tolist() == of_images.tolist() == list(range(100))


class Three:
    """Three images, of which the first and the last share a caption."""

    def __len__(self) -> int:
        return 3

    def read(self, index: int) -> RawSample:
        captions = (("a", "also a"), ("b",), ("c", "a"))[index]
        return RawSample(str(index), "here", np.zeros((8, 8, 3), dtype=np.uint8), captions, None)


def test_board_shows_the_nearest_different_texts_and_where_its_own_caption_stands() -> None:
    source: Any = Three()
    for to_first, shown, place in (
        ((0.9, 0.8, 0.0, 0.7, 0.9), [("a", True), ("also a", True), ("c", False)], ("a", 1)),
        ((0.2, 0.3, 0.9, 0.7, 0.4), [("b", False), ("c", False), ("a", True)], ("also a", 4)),
    ):
        texts = torch.tensor([[near, 0.0, 0.0] for near in to_first])
        row, *_ = board(Pairs(torch.eye(3), texts, torch.tensor([0, 0, 1, 2, 2])), source, texts=3)
        assert [(text.text, text.own) for text in row.texts] == shown
        assert (row.caption, row.place) == place
