"""Ranks among images and texts: exact, ties by number, the same in any cut, never a matrix of all pairs."""

import subprocess
import sys
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.evaluate.ranking import Pairs, ahead, exact
from trainer.evaluate.retrieval import Retrieval

STEP = 2.0**-24


def brute_force(pairs: Pairs) -> tuple[list[int], list[int]]:
    """Places from 0 in a stable sort of the whole matrix; Python's integers, so that nothing is rounded."""
    images, texts = ((rows.double() / STEP).long().tolist() for rows in (pairs.images_ND, pairs.texts_TD))
    image_of = pairs.image_of_T.tolist()
    cosines: NDArray[np.object_] = np.array(
        [[sum(a * b for a, b in zip(i, t, strict=True)) for t in texts] for i in images], dtype=object
    )
    by_image = [sorted(range(len(texts)), key=lambda t: (-row[t], t)) for row in cosines]
    by_text = [sorted(range(len(images)), key=lambda i: (-column[i], i)) for column in cosines.T]
    nearest_own = [
        min(order.index(t) for t, owner in enumerate(image_of) if owner == i)
        for i, order in enumerate(by_image)
    ]
    return nearest_own, [order.index(image_of[t]) for t, order in enumerate(by_text)]


def make_pairs(images: int, captions: list[int], seed: int, alphabet: int) -> Pairs:
    """Few different vectors, so that many cosines are equal."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(alphabet, 5, generator=generator)
    image_of = torch.tensor([number for number in range(images) for _ in range(captions[number])])
    drawn = torch.randint(alphabet, (images + len(image_of),), generator=generator)
    features = exact(vectors[drawn])
    return Pairs(features[:images], features[images:], image_of)


def last(counts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return list(counts)[-1]


def in_shares(pairs: Pairs, world_size: int, size: int) -> tuple[list[int], list[int]]:
    images = len(pairs.images_ND)
    every = world_size * size
    shares = [
        last(ahead(pairs, range(rank * size, images + rank * size, every))) for rank in range(world_size)
    ]
    of_texts, of_images = (torch.stack(parts).sum(0).tolist() for parts in zip(*shares, strict=True))
    return of_texts, of_images


@settings(max_examples=60, deadline=None)
@given(
    captions=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    alphabet=st.integers(1, 40),
    world_size=st.integers(1, 5),
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
)
def test_ranks_are_those_of_a_stable_sort_of_all_pairs_in_any_cut(
    captions: list[int], seed: int, alphabet: int, world_size: int, rows: int, columns: int
) -> None:
    pairs = make_pairs(len(captions), captions, seed, alphabet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.evaluate.ranking.ROWS", rows)
        patch.setattr("trainer.evaluate.ranking.COLUMNS", columns)
        assert in_shares(pairs, world_size, rows) == brute_force(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_exact_features_are_whole_steps_near_the_unit_vector(dtype: torch.dtype) -> None:
    given = torch.randn(50, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    rounded = exact(given).double()
    steps = rounded / STEP
    assert torch.equal(steps, steps.round())
    unit = torch.nn.functional.normalize(given.double(), dim=1)
    assert float((rounded - unit).abs().max()) <= STEP / 2


def test_cosines_do_not_depend_on_the_order_of_adding() -> None:
    generator = torch.Generator().manual_seed(2)
    images, texts = (exact(torch.randn(300, 512, generator=generator)).double() for _ in range(2))
    shuffled = torch.randperm(512, generator=generator)
    assert torch.equal(images @ texts.T, images[:, shuffled] @ texts[:, shuffled].T)
    assert torch.equal((images @ texts.T)[7:8, :90], images[7:8] @ texts[:90].T)


def test_a_model_with_equal_features_for_everything_finds_nothing() -> None:
    for broken in (torch.ones(100, 8), torch.full((100, 8), torch.nan), torch.full((100, 8), torch.inf)):
        pairs = Pairs(exact(broken), exact(broken), torch.arange(100))
        of_texts, of_images = last(ahead(pairs, [0]))
        assert of_texts.tolist() == of_images.tolist() == list(range(100))


def test_metrics_are_shares_of_images_and_of_texts() -> None:
    metrics = Retrieval(torch.tensor([1, 4, 11, 2]), torch.tensor([1, 1, 7, 12, 30])).metrics()
    assert metrics == {
        "retrieval_images": 4,
        "retrieval_texts": 5,
        "retrieval_i2t_r1": 0.25,
        "retrieval_i2t_r5": 0.75,
        "retrieval_i2t_r10": 0.75,
        "retrieval_i2t_median_rank": 3.0,
        "retrieval_t2i_r1": 0.4,
        "retrieval_t2i_r5": 0.4,
        "retrieval_t2i_r10": 0.6,
        "retrieval_t2i_median_rank": 7.0,
    }


@given(st.lists(st.integers(1, 10**6), min_size=1))
def test_the_median_is_that_of_numpy(ranks: list[int]) -> None:
    metrics = Retrieval(torch.tensor(ranks), torch.tensor([1])).metrics()
    assert metrics["retrieval_i2t_median_rank"] == np.median(ranks)


def test_a_query_of_several_images_is_found_by_the_nearest_of_them() -> None:
    """Texts 0, 2 and 3 are one query, which images at the places 7, 2 and 9 answer."""
    ranks = Retrieval(torch.tensor([1, 1]), torch.tensor([7, 1, 2, 9]), torch.tensor([40, 12, 40, 40]))
    assert sorted(ranks.of_queries().tolist()) == [1, 2]


MEMORY = """
import resource, sys, torch
from trainer.evaluate.ranking import ROWS, Pairs, ahead, exact

def used_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

pairs, width = int(sys.argv[1]), 512
first = pairs // ROWS // 2 * ROWS
exact(torch.randn(100, 512)) @ torch.randn(512, 100)
before = used_mb()
images, texts = torch.empty(pairs, width), torch.empty(pairs, width)
for features in (images, texts):
    for rows in features.split(10_000):
        rows.copy_(exact(torch.randn_like(rows)))
((ahead_images, ahead_texts),) = ahead(Pairs(images, texts, torch.arange(pairs)), [first])
used = used_mb() - before
for row in range(first, first + ROWS, 100):
    cosines = texts.double() @ images[row].double()
    assert int(ahead_images[row]) == int((cosines > cosines[row]).sum())
    of_text = images[first : first + ROWS].double() @ texts[row].double()
    assert int(ahead_texts[row]) == int((of_text > cosines[row]).sum())
print(used)
"""


@pytest.mark.parametrize(
    ("pairs", "limit_mb"), [(20_000, 400), pytest.param(100_000, 1000, marks=pytest.mark.full)]
)
def test_pairs_of_512_features_are_ranked_without_a_matrix_of_all_pairs(pairs: int, limit_mb: int) -> None:
    """One block of rows meets all columns, and further blocks need no more memory.

    Some rows of a block are counted again in one piece.
    """
    command = [sys.executable, "-c", MEMORY, str(pairs)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(ran.stdout) < limit_mb
