"""Ranks images and texts among each other, exactly and in blocks. Its part of the work is an argument.

Cosines are computed without any rounding: `exact` rounds unit vectors to multiples of 2^-24, so that products
are multiples of 2^-48 and float64 holds each partial sum, which Cauchy-Schwarz keeps below 2. Whatever the
order of adding - block, thread, rank, device - a pair has one cosine, equal pairs tie, and a tie is ranked by
number: the lower one comes first, as in a stable sort. Shape suffixes: N images, T texts, D features, R rows
and C columns of a block.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 512
COLUMNS = 4096
STEP = 2.0**-24
_HALF_OF_A_STEP = 2.0**-49
"""Half of one rounding step of a cosine; cosines closer than this count as equal."""


@dataclass(frozen=True)
class Pairs:
    """Features of images and of their texts.

    Every image has a text, and texts are in the order of their images.
    """

    images_ND: Tensor
    """Image features, float32, as `exact` returns them."""
    texts_TD: Tensor
    image_of_T: Tensor
    """Number of each text's image, int64, ascending from 0."""


def exact(features: Tensor) -> Tensor:
    """Returns float32 unit vectors [n, D] in multiples of 2^-24.

    What is not finite becomes zeros; `trainer.evaluate.features.finite` refuses it before.
    """
    finite = torch.nan_to_num(features.double(), nan=0.0, posinf=0.0, neginf=0.0)
    unit = torch.nn.functional.normalize(finite, dim=1)
    return unit.div_(STEP).round_().mul_(STEP).float()


def ahead(pairs: Pairs, begins: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Counts the nearer texts and images in the blocks of `ROWS` images that begin at `begins`.

    Yields after each block the counts so far, in the same two tensors: int64 [N], the texts nearer to each
    image than its own nearest text, and int64 [T], the images nearer to each text than its own image. Over
    all blocks, a count is the place in the ranking, from 0. A block after the last image is empty.
    """
    own_T = _own_cosines(pairs)
    best_N, best_text_N = _best_texts(pairs, own_T)
    images, texts = len(pairs.images_ND), len(pairs.texts_TD)
    numbers = torch.arange(max(images, texts), device=own_T.device)
    ahead_N, ahead_T = torch.zeros_like(best_text_N), torch.zeros_like(pairs.image_of_T)
    for first in begins:
        row = slice(min(first, images), min(first + ROWS, images))
        images_RD = pairs.images_ND[row].double()
        for left in range(0, texts, COLUMNS):
            column = slice(left, min(left + COLUMNS, texts))
            cosines_RC = images_RD @ pairs.texts_TD[column].double().T
            is_earlier_text_RC = numbers[column] < best_text_N[row, None]
            is_earlier_image_RC = numbers[row, None] < pairs.image_of_T[column]
            ahead_N[row] += _is_ahead(cosines_RC, best_N[row, None], is_earlier_text_RC).sum(1)
            ahead_T[column] += _is_ahead(cosines_RC, own_T[column], is_earlier_image_RC).sum(0)
        yield ahead_N, ahead_T


def _is_ahead(cosines_RC: Tensor, own: Tensor, is_earlier_RC: Tensor) -> Tensor:
    """Returns whether a pair is nearer, or as near and earlier.

    One comparison is enough, since no cosine lies within half a step below `own`.
    """
    return cosines_RC > torch.where(is_earlier_RC, own - _HALF_OF_A_STEP, own)


def _own_cosines(pairs: Pairs) -> Tensor:
    """Returns the cosine of each text with its own image, float64 [T]."""
    parts = zip(pairs.texts_TD.split(COLUMNS), pairs.image_of_T.split(COLUMNS), strict=True)
    return torch.cat(
        [(texts_CD.double() * pairs.images_ND[of_C].double()).sum(1) for texts_CD, of_C in parts]
    )


def _best_texts(pairs: Pairs, own_T: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nearest of each image's own texts: float64 [N] cosines and int64 [N] numbers.

    If several are as near, it is the one with the lowest number.
    """
    best_N = own_T.new_full((len(pairs.images_ND),), -torch.inf).scatter_reduce(
        0, pairs.image_of_T, own_T, "amax"
    )
    numbers_T = torch.arange(len(own_T), device=own_T.device)
    candidates_T = torch.where(own_T == best_N[pairs.image_of_T], numbers_T, len(own_T))
    last_N = numbers_T.new_full((len(best_N),), len(own_T))
    return best_N, last_N.scatter_reduce(0, pairs.image_of_T, candidates_T, "amin")
