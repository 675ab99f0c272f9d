"""The retrieval board: which texts stand beside an image."""

import base64
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from trainer.data.sample import RawSample
from trainer.evaluate.evaluation import board
from trainer.evaluate.ranking import Pairs

CAPTIONS = (("a", "also a"), ("b",), ("c", "a"))


class Three:
    """Three images, of one colour each; the first and the last share a caption."""

    left_out: Any = None

    def __len__(self) -> int:
        return 3

    def shard_sizes(self) -> list[int]:
        return [3]

    def read(self, index: int) -> RawSample:
        return RawSample(
            str(index), "here", np.full((8, 8, 3), 80 * index, dtype=np.uint8), CAPTIONS[index], None
        )


def test_each_image_shows_its_nearest_different_texts_and_which_are_its_own() -> None:
    images = torch.eye(3)
    texts = torch.tensor(
        [[0.9, 0.0, 0.1], [0.8, 0.0, 0.0], [0.0, 1.0, 0.0], [0.7, 0.0, 1.0], [0.9, 0.0, 0.1]]
    )
    rows = board(Pairs(images, texts, torch.tensor([0, 0, 1, 2, 2])), Three(), images=3, texts=3)
    assert [[(text.text, round(text.score, 1), text.own) for text in row.texts] for row in rows] == [
        [("a", 0.9, True), ("also a", 0.8, True), ("c", 0.7, False)],
        [("b", 1.0, True), ("a", 0.0, False), ("also a", 0.0, False)],
        [("c", 1.0, True), ("a", 0.1, True), ("also a", 0.0, False)],
    ]
    assert [(row.caption, row.place) for row in rows] == [("a", 1), ("b", 1), ("c", 1)]
    shades = [Image.open(io.BytesIO(base64.b64decode(row.image))).getpixel((0, 0)) for row in rows]
    assert shades == [(0, 0, 0), (80, 80, 80), (160, 160, 160)]


def test_row_has_its_own_caption_and_its_place_where_others_are_nearer() -> None:
    texts = torch.tensor(
        [[0.2, 0.0, 0.0], [0.3, 0.0, 0.0], [0.9, 1.0, 0.0], [0.7, 0.0, 1.0], [0.4, 0.0, 0.1]]
    )
    rows = board(Pairs(torch.eye(3), texts, torch.tensor([0, 0, 1, 2, 2])), Three(), images=3, texts=2)
    assert [text.own for text in rows[0].texts] == [False, False]
    assert (rows[0].caption, rows[0].place) == ("also a", 4)
