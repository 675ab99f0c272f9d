"""Shares, micro-batches, evaluation blocks and random numbers of ranks, tested in one process."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from tests.support.loading import rank_batches, refusal
from trainer.config import Data
from trainer.data.captions import CHOICES, WeightedCaption
from trainer.data.eval_blocks import eval_blocks
from trainer.data.loader import Batch
from trainer.data.sample import RawSample
from trainer.data.source import open_source


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


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= 8),
    starts=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 7)), max_size=4
    ),
)
def test_kills_and_other_worlds_change_no_global_batch(
    sizes: list[int], starts: list[tuple[int, int, int]]
) -> None:
    """Each start has other ranks and micro-batches, and is killed; the last finishes the three epochs."""
    source, an_epoch = Dots(*sizes), sum(sizes) // 8
    whole = in_order([batches(source, epochs=3)])
    seen: list[list[Batch]] = []
    done = 0
    for ranks, accumulation, count in [*starts, (1, 1, 3 * an_epoch)]:
        stop = min(done + count, 3 * an_epoch)
        if done == stop:
            continue
        epoch, batch = divmod(done, an_epoch)
        how = {"accumulation": accumulation, "epochs": 3, "start_epoch": epoch, "start_batch": batch}
        for rank in range(ranks):
            seen.append(batches(source, ranks, rank, **how)[: (stop - done) * accumulation])
        done = stop
    assert in_order(seen) == whole


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
    assert "global_batch_size = 8 is more than the 7 usable samples" in refusal(batches, Dots(7))


def test_made_up_pictures_are_rgb_bytes_that_follow_from_their_number_alone() -> None:
    image, same = (
        open_source(Data(format="synthetic", synthetic_samples=count)).read(0).image for count in (1, 150)
    )
    assert np.array_equal(np.asarray(image), np.asarray(same))
    assert isinstance(image, np.ndarray)
    assert image.shape == (64, 64, 3)
    assert image.dtype == np.uint8
    with pytest.raises(IndexError):
        open_source(Data(format="synthetic", synthetic_samples=1)).read(1)


def blocks(source: Dots, ranks: int, block: int) -> list[Any]:
    how: dict[str, Any] = {"world_size": ranks, "block": block, "transform": to_tensor, "workers": 0}
    found = [eval_blocks(source, rank=rank, **how) for rank in range(ranks)]
    return sorted((block for of_rank in found for block in of_rank), key=lambda block: block.numbers)


@pytest.mark.parametrize(("samples", "ranks"), [(1, 2), (5, 7), (18, 4)])
def test_evaluation_blocks_are_the_same_in_any_world_and_the_last_is_filled_with_zeros(
    samples: int, ranks: int
) -> None:
    alone, shared = blocks(Dots(samples), 1, 4), blocks(Dots(samples), ranks, 4)
    assert [number for block in shared for number in block.numbers] == list(range(samples))
    for one, other in zip(shared, alone, strict=True):
        assert one.numbers == other.numbers
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    missing = -samples % 4
    assert shared[-1].labels.tolist() == [*range(samples + missing - 4, samples), *[-1] * missing]
    assert not shared[-1].images[4 - missing :].any()
