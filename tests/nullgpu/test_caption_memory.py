"""Captions of any length find their place in the memory that whole ones have taken."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.null_gpu_steps import RealStep, moved_gib
from tools import nullgpu
from trainer.comm.protocol import Comm
from trainer.data.loader import Batch
from trainer.model.caption_length import CaptionLength
from trainer.model.packed_captions import Packed, pack
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


def packed(samples: int, mean: int, seed: int, *, whole: bool = False) -> Packed:
    """Captions of random lengths about a mean."""
    generator = torch.Generator().manual_seed(seed)
    counted = (torch.rand(samples, generator=generator) * 2 * mean).long().clamp(3, 77)
    return pack(torch.ones(samples, 77, dtype=torch.int64), counted, torch.device("cuda"), whole=whole)


def test_the_gpus_memory_stays_as_it_is_over_packed_captions(gpu: Comm) -> None:
    step = RealStep(gpu, "ViT-B-32", 512)
    torch.cuda.empty_cache()
    for seed in range(2):
        step(packed(512, 20, seed, whole=True))
    first = torch.cuda.memory_reserved()
    for seed in range(20):
        step(packed(512, random.Random(seed).randint(8, 60), seed))
    assert torch.cuda.memory_reserved() <= 1.01 * first


def test_a_step_computes_what_stands_in_captions_and_waits_for_nothing(gpu: Comm) -> None:
    """If 20 of 77 tokens count, the text tower moves a quarter, and the image tower all of its own."""
    step = RealStep(gpu, "ViT-B-32", 512)
    for _ in range(3):
        step()
    whole = moved_gib(step)
    captions = packed(512, 20, 1)
    with nullgpu.watch() as seen:
        step(captions)
    assert seen.waits == []
    assert moved_gib(lambda: step(captions)) < 0.7 * whole


class Computed(TorchDispatchMode):
    """Names of operators that compute as many values on the host as torch gives to several threads."""

    threaded = 2**15
    same_memory = ("empty", "detach", "lift_fresh", "view", "reshape", "alias")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        is_large = isinstance(out, torch.Tensor) and out.device.type == "cpu" and out.numel() >= self.threaded
        if is_large and not name.startswith(self.same_memory):
            self.names.append(name)
        return out


def test_packing_wakes_no_threads(gpu: Comm) -> None:
    """After their work they spin for milliseconds, on cores that loader processes need."""
    tokens = torch.randint(1, 1000, (1024, 77))
    for rule in (CaptionLength(), CaptionLength(end_token=999), CaptionLength(padding=1)):
        with Computed() as computed:
            pack(tokens, rule.needed(tokens), gpu.device, whole=True)
        assert computed.names == []
    with Computed() as computed:
        tokens.pin_memory()
    assert computed.names == ["_pin_memory"]


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
        found = [[part.rows.shape[1] for part in step] for step in steps]
        assert found == [[length] * 2 for length in lengths]


def test_captions_are_packed_if_the_model_takes_them_so(gpu: Comm) -> None:
    channels = [0.5] * 3
    prefetcher = Prefetcher(gpu.device, torch.float32, channels, channels, CaptionLength(packs=True), 1)
    steps = prefetcher.steps(batches([5, 9, 9, 20]), 2)
    found = [[len(part.tokens[0]) for part in step] for step in steps]
    assert found == [[2 * 77] * 2, [16, 32]], "all tokens at first; then multiples of 4 for each caption"
