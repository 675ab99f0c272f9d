"""Makes the retrieval board of a run: a few images, each with the texts that the model finds nearest."""

import torch

from trainer.data.pictures import MOST_PIXELS, decode
from trainer.data.source import Source
from trainer.evaluate.ranking import Pairs
from trainer.report.board import BoardRow, Text, row

IMAGES = 12
TEXTS = 5


def board(
    pairs: Pairs, source: Source, images: int = IMAGES, texts: int = TEXTS, most_pixels: int = MOST_PIXELS
) -> list[BoardRow]:
    """Returns images spread evenly over the set with their nearest different texts, nearest first.

    Not collective.
    """
    chosen = torch.linspace(0, len(source) - 1, min(images, len(source))).long()
    scores_BT = pairs.images_ND[chosen] @ pairs.texts_TD.T
    return [
        _row(number, scores, pairs, source, texts, most_pixels)
        for number, scores in zip(chosen.tolist(), scores_BT, strict=True)
    ]


def _row(
    number: int, scores_T: torch.Tensor, pairs: Pairs, source: Source, texts: int, most_pixels: int
) -> BoardRow:
    nearest: dict[str, Text] = {}
    for text in scores_T.argsort(descending=True, stable=True).tolist():
        of_image = int(pairs.image_of_T[text])
        first = int(torch.searchsorted(pairs.image_of_T, of_image))  # the texts of one image are consecutive
        caption = source.read(of_image).captions[text - first]
        own = caption in source.read(number).captions
        nearest.setdefault(caption, Text(caption, float(scores_T[text]), own))
        if len(nearest) == texts:
            break
    sample = source.read(number)
    own_T = (pairs.image_of_T == number).nonzero().flatten()
    if not len(own_T):
        return row(decode(sample, most_pixels), list(nearest.values()))
    best = int(scores_T[own_T].argmax())
    place = 1 + int((scores_T > scores_T[own_T[best]]).sum())
    return row(decode(sample, most_pixels), list(nearest.values()), sample.captions[best], place)
