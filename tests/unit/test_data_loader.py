"""Samples that a rank gets, tested in one process.

The subjects: shares, micro-batches, evaluation blocks, random numbers, errors.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from tests.support.loading import rank_batches
from trainer.data.captions import CHOICES, WeightedCaption
from trainer.data.eval_blocks import eval_blocks
from trainer.data.loader import Batch
from trainer.data.sample import BadSample, RawSample
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


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= 8),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_every_rank_gets_as_many_samples_and_none_comes_twice(
    sizes: list[int], ranks: int, accumulation: int
) -> None:
    how = {"epochs": 1, "accumulation": accumulation}
    per_rank = [batches(Dots(*sizes), ranks, rank, **how) for rank in range(ranks)]
    assert {len(of_rank) for of_rank in per_rank} == {sum(sizes) // 8 * accumulation}
    samples = in_order(per_rank)
    assert [position for _, position, _, _ in samples] == list(range(sum(sizes) // 8 * 8))
    assert len({key for _, _, key, _ in samples}) == len(samples)
    for batch in per_rank[0]:
        assert (batch.images.shape[1:], batch.images.dtype) == ((3, 1, 1), torch.uint8)
        assert batch.tokens[:, 1].tolist() == list(map(int, batch.keys))
        assert [caption.split()[0] for caption in batch.captions] == batch.keys


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 2), (2, 1), (4, 2)])
def test_global_batches_are_the_same_for_any_world_and_accumulation(ranks: int, accumulation: int) -> None:
    source = Dots(13, 9, 5)
    alone = batches(source)
    per_rank = [batches(source, ranks, rank, accumulation=accumulation) for rank in range(ranks)]
    assert in_order(per_rank) == in_order([alone])
    for number, whole in enumerate(alone):
        share = slice(number * accumulation, (number + 1) * accumulation)
        parts = [batch for of_rank in per_rank for batch in of_rank[share]]
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert [part.micro_batch for part in parts] == [*range(accumulation)] * ranks
        assert {(part.epoch, part.batch_in_epoch) for part in parts} == {(whole.epoch, whole.batch_in_epoch)}


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= 8),
    starts=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 7)), max_size=4),
)
def test_kills_and_other_worlds_change_no_global_batch(
    sizes: list[int], starts: list[tuple[int, int]]
) -> None:
    """Each start has another world, does some global batches and is killed.

    The last one finishes the three epochs.
    """
    source, an_epoch = Dots(*sizes), sum(sizes) // 8
    whole = in_order([batches(source, epochs=3)])
    seen: list[list[Batch]] = []
    done = 0
    for ranks, count in [*starts, (1, 3 * an_epoch)]:
        stop = min(done + count, 3 * an_epoch)
        if done == stop:
            continue
        epoch, batch = divmod(done, an_epoch)
        for rank in range(ranks):
            rest = batches(source, ranks, rank, epochs=3, start_epoch=epoch, start_batch=batch)
            seen.append(rest[: stop - done])
        done = stop
    assert in_order(seen) == whole


class Into:
    """`noisy`, but written straight into the batch; every 7th sample is broken halfway."""

    def __init__(self) -> None:
        self.written = 0

    def __call__(self, raw: RawSample, seed: int) -> Tensor:
        if int(raw.key) % 7 == 3:
            raise BadSample("dots", raw.key, "broken", "is broken")
        return noisy(raw, seed)

    def into(self, raw: RawSample, seed: int, out: Tensor) -> None:
        out.fill_(255)
        out.copy_(self(raw, seed))
        self.written += 1


def test_pixels_that_are_written_into_the_batch_are_those_that_are_returned() -> None:
    into, found = Into(), []
    for pixels in (into, into.__call__):
        found.append(batches(Dots(20, 30), accumulation=2, pixels=pixels, skip_bad=True))
    assert into.written >= 2 * 6 * 8 - 2 * 6 * 2 - 1, "all but the first of each micro-batch"
    assert any(batch.bad for batch in found[0])
    for batch, other in zip(*found, strict=True):
        assert torch.equal(batch.images, other.images)
        assert (batch.keys, batch.captions) == (other.keys, other.captions)


def test_epochs_differ_in_order_captions_and_augmentation() -> None:
    both = batches(Dots(64), batch=64)
    first, second = (
        {key: (c, i.item()) for key, c, i in zip(b.keys, b.captions, b.images[:, 0, 0, 0], strict=True)}
        for b in both
    )
    assert both[0].keys != both[1].keys
    assert 7 < sum(first[key][0] == second[key][0] for key in first) < 42
    assert sum(first[key][1] == second[key][1] for key in first) < 10


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


@pytest.mark.parametrize(("samples", "ranks"), [(1, 2), (4, 2), (5, 7), (17, 1), (17, 4)])
def test_evaluation_blocks_are_the_same_in_any_world(samples: int, ranks: int) -> None:
    alone, shared = blocks(Dots(samples), 1, 4), blocks(Dots(samples), ranks, 4)
    assert [block.numbers for block in shared] == [block.numbers for block in alone]
    assert [number for block in shared for number in block.numbers] == list(range(samples))
    assert sum(block.valid for block in shared) == samples
    for one, other in zip(shared, alone, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def test_the_last_evaluation_block_is_filled_with_zeros() -> None:
    block = blocks(Dots(6), 1, 4)[1]
    assert (block.numbers, block.labels.tolist()) == ((4, 5), [4, 5, -1, -1])
    assert block.images[:, 0, 0, 0].tolist() == [4, 5, 0, 0]
