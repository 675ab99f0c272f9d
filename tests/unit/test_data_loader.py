"""Samples that a rank gets, tested in one process.

The subjects: shares, micro-batches, evaluation blocks, random numbers, errors.
"""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from trainer.config.batch_plan import BatchPlan
from trainer.data.captions import CHOICES, Choice, WeightedCaption, random_caption
from trainer.data.eval_blocks import EvalBlock, eval_blocks
from trainer.data.lanes import Lanes
from trainer.data.loader import Batch, Pixels, batches_per_epoch, train_batches
from trainer.data.sample import BadSample, LeftOut, RawSample
from trainer.errors import InputError


class Dots:
    """Sample n is one pixel of colour n, with two captions that name it, and label n."""

    left_out = LeftOut()

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


def plain(raw: RawSample, seed: int) -> Tensor:
    assert isinstance(raw.image, np.ndarray)
    return torch.from_numpy(raw.image).permute(2, 0, 1)


def noisy(raw: RawSample, seed: int) -> Tensor:
    """The seed is all that augmentation may draw from."""
    return plain(raw, seed) + seed % 199


def lengths(captions: list[str]) -> Tensor:
    return torch.tensor([[len(caption), int(caption.split()[0])] for caption in captions])


def make_plan(world_size: int, global_batch_size: int, accumulation: int = 1) -> BatchPlan:
    per_rank = global_batch_size // world_size
    return BatchPlan(world_size, global_batch_size, per_rank, per_rank // accumulation, accumulation)


def rank_batches(
    source: Dots,
    plan: BatchPlan,
    rank: int,
    *,
    pixels: Pixels = plain,
    epochs: int = 2,
    epoch: int = 0,
    batch: int = 0,
    choice: Choice = random_caption,
) -> list[Batch]:
    stream = train_batches(
        source,
        plan=plan,
        rank=rank,
        seed=5,
        order=Lanes(3, 2),
        pixels=pixels,
        tokenizer=lengths,
        workers=0,
        epochs=epochs,
        start_epoch=epoch,
        start_batch=batch,
        caption_choice=choice,
    )
    return list(stream)


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
    st.lists(st.integers(0, 30), min_size=1, max_size=4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])
)
def test_every_rank_gets_as_many_samples_and_none_comes_twice(
    sizes: list[int], world_size: int, accumulation: int
) -> None:
    source, plan = Dots(*sizes), make_plan(world_size, 8, accumulation)
    if sum(sizes) < 8:
        return
    per_rank = [rank_batches(source, plan, rank, epochs=1) for rank in range(world_size)]
    assert {len(batches) for batches in per_rank} == {sum(sizes) // 8 * accumulation}
    samples = in_order(per_rank)
    assert [position for _, position, _, _ in samples] == list(range(sum(sizes) // 8 * 8))
    assert len({key for _, _, key, _ in samples}) == len(samples)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_global_batches_are_the_same_for_any_world_and_accumulation(
    world_size: int, accumulation: int
) -> None:
    source = Dots(13, 9, 5)
    alone = rank_batches(source, make_plan(1, 8), 0, pixels=noisy)
    plan = make_plan(world_size, 8, accumulation)
    per_rank = [rank_batches(source, plan, rank, pixels=noisy) for rank in range(world_size)]
    assert in_order(per_rank) == in_order([alone])
    for number, whole in enumerate(alone):
        parts = [
            batch
            for batches in per_rank
            for batch in batches[number * accumulation : (number + 1) * accumulation]
        ]
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert [part.micro_batch for part in parts] == [*range(accumulation)] * world_size
        assert {(part.epoch, part.batch_in_epoch) for part in parts} == {(whole.epoch, whole.batch_in_epoch)}


def test_images_captions_tokens_and_keys_belong_together() -> None:
    for batch in rank_batches(Dots(20), make_plan(1, 4), 0):
        assert batch.images.shape == (4, 3, 1, 1)
        assert (batch.images.dtype, batch.tokens.dtype, batch.positions.dtype) == (
            torch.uint8,
            torch.int64,
            torch.int64,
        )
        numbers = [int(key) for key in batch.keys]
        assert batch.images[:, 0, 0, 0].tolist() == numbers
        assert batch.tokens[:, 1].tolist() == numbers
        assert [int(caption.split()[0]) for caption in batch.captions] == numbers


@pytest.mark.parametrize(("epoch", "batch"), [(0, 2), (1, 0), (1, 1)])
def test_starting_in_the_middle_gives_what_was_left(epoch: int, batch: int) -> None:
    source, plan = Dots(13, 12), make_plan(2, 8, 2)
    whole = rank_batches(source, plan, 1, pixels=noisy)
    rest = rank_batches(source, plan, 1, pixels=noisy, epoch=epoch, batch=batch)
    expected = [b for b in whole if (b.epoch, b.batch_in_epoch) >= (epoch, batch)]
    assert [b.keys for b in rest] == [b.keys for b in expected]
    assert all(torch.equal(a.images, b.images) for a, b in zip(rest, expected, strict=True))


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
    source = Dots(*sizes)
    an_epoch = sum(sizes) // 8
    whole = in_order([rank_batches(source, make_plan(1, 8), 0, pixels=noisy, epochs=3)])
    seen: list[list[Batch]] = []
    done = 0
    for world_size, batches in [*starts, (1, 3 * an_epoch)]:
        stop = min(done + batches, 3 * an_epoch)
        if done == stop:
            continue
        epoch, batch = divmod(done, an_epoch)
        plan = make_plan(world_size, 8)
        for rank in range(world_size):
            seen.append(
                rank_batches(source, plan, rank, pixels=noisy, epochs=3, epoch=epoch, batch=batch)[
                    : stop - done
                ]
            )
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
    plan, into = make_plan(1, 8, 2), Into()
    batches, same = (
        list(
            train_batches(
                Dots(20, 30), plan=plan, rank=0, seed=5, order=Lanes(3, 2), pixels=pixels, tokenizer=lengths,
                workers=0, epochs=2, skip_bad=True,
            )
        )
        for pixels in (into, into.__call__)
    )  # fmt: skip
    assert into.written >= 2 * 6 * 8 - 2 * 6 * 2 - 1, "all but the first of each micro-batch"
    assert any(batch.bad for batch in batches)
    for batch, other in zip(batches, same, strict=True):
        assert torch.equal(batch.images, other.images)
        assert (batch.keys, batch.captions) == (other.keys, other.captions)


def test_epochs_differ_in_order_captions_and_augmentation() -> None:
    batches = rank_batches(Dots(64), make_plan(1, 64), 0, pixels=noisy, epochs=2)
    first, second = (
        {key: (c, i.item()) for key, c, i in zip(b.keys, b.captions, b.images[:, 0, 0, 0], strict=True)}
        for b in batches
    )
    assert batches[0].keys != batches[1].keys
    assert 7 < sum(first[key][0] == second[key][0] for key in first) < 42
    assert sum(first[key][1] == second[key][1] for key in first) < 10


@pytest.mark.parametrize("name", [*CHOICES, "weights"])
def test_each_choice_of_captions_is_the_same_on_any_ranks_and_after_a_resume(name: str) -> None:
    source, choice = Dots(20, 12), CHOICES.get(name, WeightedCaption((3.0, 0.5)))
    alone = rank_batches(source, make_plan(1, 8), 0, choice=choice)
    two = [rank_batches(source, make_plan(2, 8), rank, choice=choice) for rank in range(2)]
    assert in_order(two) == in_order([alone])
    resumed = [
        rank_batches(source, make_plan(2, 8), rank, choice=choice, epoch=1, batch=2) for rank in range(2)
    ]
    assert in_order(resumed) == in_order([alone[6:]])
    taken = {caption.split()[1] for batch in alone for caption in batch.captions}
    assert taken == {"random": {"one", "two", "three"}, "first": {"one"}, "longest": {"three"}}.get(
        name, {"one", "two", "three"}
    )


def test_without_a_number_of_epochs_loading_never_ends() -> None:
    stream = train_batches(
        Dots(8),
        plan=make_plan(1, 8),
        rank=0,
        seed=0,
        order=Lanes(3, 2),
        pixels=plain,
        tokenizer=lengths,
        workers=0,
    )
    assert [batch.epoch for batch in islice(stream, 30)] == list(range(30))


def test_a_start_beyond_the_epoch_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="start_batch 2 of 2"):
        rank_batches(Dots(16), make_plan(1, 8), 0, batch=2)


def test_fewer_samples_than_a_global_batch_are_refused() -> None:
    with pytest.raises(InputError, match="global_batch_size = 8 is more than the 7 usable samples"):
        batches_per_epoch(7, make_plan(1, 8))


def blocks(source: Dots, world_size: int, block: int) -> list[EvalBlock]:
    found = [
        eval_blocks(source, rank=rank, world_size=world_size, block=block, transform=to_tensor, workers=0)
        for rank in range(world_size)
    ]
    return sorted((block for of_rank in found for block in of_rank), key=lambda block: block.numbers)


@pytest.mark.parametrize("samples", [1, 3, 4, 5, 17])
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_evaluation_blocks_are_the_same_in_any_world(samples: int, world_size: int) -> None:
    alone, shared = blocks(Dots(samples), 1, 4), blocks(Dots(samples), world_size, 4)
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
