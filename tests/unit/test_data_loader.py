"""Samples that a rank gets, tested in one process.

The subjects: shares, micro-batches, evaluation blocks, random numbers, errors.
"""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.support.loading import rank_batches
from trainer.data.captions import CHOICES, WeightedCaption
from trainer.data.eval_blocks import eval_blocks
from trainer.data.loader import Batch
from trainer.data.sample import RawSample
from trainer.errors import InputError


class Dots:
    """Sample n is one pixel of colour n, with three captions that name it, and label n."""

    left_out: Any = None

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return sum(self._sizes)

    def shard_sizes(self) -> list[int]:
        return list(self._sizes)

    def read(self, index: int) -> RawSample:
        image = np.full((1, 1, 3), index, dtype=np.uint8)
        captions = (f"{index} one", f"{index} two", f"{index} three")
        return RawSample(str(index), "dots", image, captions, index, caption_counts=(1, 2))


def to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()


def noisy(raw: RawSample, seed: int) -> Tensor:
    """The seed is all that augmentation may draw from."""
    assert isinstance(raw.image, np.ndarray)
    return torch.from_numpy(raw.image).permute(2, 0, 1) + seed % 199


def lengths(captions: list[str]) -> Tensor:
    return torch.tensor([[len(caption), int(caption.split()[0])] for caption in captions])


def batches(source: Dots, ranks: int = 1, rank: int = 0, batch: int = 8, **how: Any) -> list[Batch]:
    how = {"seed": 5, "pixels": noisy, "tokenizer": lengths, "epochs": 2, **how}
    return list(rank_batches(source, (3, 2), batch, ranks, rank=rank, **how))


def in_order(batches: list[list[Batch]]) -> list[tuple[int, int, str, str]]:
    """(epoch, position, key, caption) of all ranks' samples, by epoch and position."""
    return sorted(
        (batch.epoch, position, key, caption)
        for of_rank in batches
        for batch in of_rank
        for position, key, caption in zip(batch.positions.tolist(), batch.keys, batch.captions, strict=True)
    )


@pytest.mark.parametrize("name", [*CHOICES, "weights"])
def test_each_choice_of_captions_is_the_same_on_any_ranks_and_after_a_resume(name: str) -> None:
    source = Dots(20, 12)
    choice: dict[str, Any] = {"caption_choice": CHOICES.get(name, WeightedCaption((3.0, 0.5)))}
    alone = batches(source, **choice)
    assert in_order([batches(source, 2, rank, **choice) for rank in range(2)]) == in_order([alone])
    resumed = [batches(source, 2, rank, start_epoch=1, start_batch=2, **choice) for rank in range(2)]
    assert in_order(resumed) == in_order([alone[6:]])
    taken = {caption.split()[1] for batch in alone for caption in batch.captions}
    assert taken == {"first": {"one"}, "longest": {"three"}}.get(name, {"one", "two", "three"})


def test_a_start_beyond_the_epoch_and_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="start_batch 2 of 2"):
        batches(Dots(16), start_batch=2)
    with pytest.raises(InputError, match="global_batch_size = 8 is more than the 7 usable samples"):
        batches(Dots(7))


def blocks(source: Dots, ranks: int, block: int) -> list[Any]:
    how: dict[str, Any] = {"world_size": ranks, "block": block, "transform": to_tensor, "workers": 0}
    found = [eval_blocks(source, rank=rank, **how) for rank in range(ranks)]
    return sorted((block for of_rank in found for block in of_rank), key=lambda block: block.numbers)
