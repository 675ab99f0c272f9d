"""Captions of any length find their place in the memory that whole ones have taken."""

import random
from collections.abc import Iterator

import torch

from tests.support.null_gpu_steps import RealStep
from trainer.comm.protocol import Comm
from trainer.data.loader import Batch
from trainer.model.caption_length import CaptionLength
from trainer.train.prefetch import Prefetcher

LENGTHS = [8, 16, 24, 32, 40, 48, 56, 64, 72, 77]


def reserved(step: RealStep, lengths: list[int]) -> tuple[int, int]:
    """Bytes that torch's allocator has taken from the GPU after the first two steps, and after all."""
    torch.cuda.empty_cache()
    found = []
    for length in lengths:
        step(length)
        found.append(torch.cuda.memory_reserved())
    return found[1], found[-1]


def test_the_gpus_memory_stays_as_it_is_over_captions_of_all_lengths(gpu: Comm) -> None:
    """To one percent: libraries' workspaces differ. If the shortest captions came first, it would grow."""
    lengths = random.Random(1).choices(LENGTHS, k=20)
    first, last = reserved(RealStep(gpu, "ViT-B-32", 512), [77, 77, *lengths])
    assert last <= 1.01 * first
    _, unordered = reserved(RealStep(gpu, "ViT-B-32", 512), sorted(LENGTHS))
    assert unordered > 1.05 * last


def batches(ends: list[int]) -> Iterator[Batch]:
    """Batches of two samples, with the end of the longer caption at the given places."""
    for end in ends:
        tokens = torch.zeros(2, 77, dtype=torch.int64)
        tokens[0, 3] = tokens[1, end] = 9
        images = torch.zeros(2, 4, 8, 8, dtype=torch.uint8)
        yield Batch(
            images.pin_memory(), tokens.pin_memory(), 0, 0, 0, torch.arange(2), ["a", "b"], ["1", "2"]
        )


def test_captions_of_the_first_two_steps_are_whole(gpu: Comm) -> None:
    channels = [0.5] * 3
    for whole_steps, lengths in ((2, [77, 77, 16, 24]), (0, [8, 16, 16, 24])):
        prefetcher = Prefetcher(gpu.device, torch.float32, channels, channels, CaptionLength(), whole_steps)
        steps = prefetcher.steps(batches([5, 5, 12, 12, 9, 9, 20, 20]), 2)
        found = [[part.tokens.shape[1] for part in step] for step in steps]
        assert found == [[length] * 2 for length in lengths]
