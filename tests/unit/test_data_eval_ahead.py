"""An evaluation reads far data a block at a time, each once, and finds what samples read alone would give."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from tests.support.pictures import picture
from tests.support.range_server import serving
from trainer.config import Eval
from trainer.data.eval_blocks import eval_blocks
from trainer.data.pack import write_shard
from trainer.data.processes import start_process_server
from trainer.data.sample import Source
from trainer.data.source import open_labelled

SIZES = (7, 30, 1, 22)
"""Samples of each shard, of which blocks of 16 begin and end anywhere."""


def tensor_of(image: Image.Image) -> Tensor:
    pixels: Tensor = pil_to_tensor(image).float()
    return pixels


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    start_process_server()
    folder = tmp_path_factory.mktemp("labelled")
    numbers = iter(range(sum(SIZES)))
    for shard, size in enumerate(SIZES):
        samples = (
            (f"{number:03d}", {"png": picture(number, 2), "cls": str(number % 5).encode()})
            for number in islice(numbers, size)
        )
        write_shard(samples, folder / f"{shard}.tar")
    return folder


def labelled(folder: object) -> Source:
    return open_labelled(Eval(zero_shot=(f"{folder}/{{0..3}}.tar",), class_names=tuple("abcde")))


@pytest.mark.parametrize(("world_size", "workers"), [(1, 2), (4, 0)])
def test_a_block_of_far_shards_is_one_request_for_each_shard_that_it_lies_in(
    shards: Path, world_size: int, workers: int
) -> None:
    source = labelled(shards)
    alone = [source.read(number) for number in range(sum(SIZES))]
    with serving(shards) as (url, server):
        far = labelled(url)
        server.asked.clear()
        how: dict[str, Any] = {"transform": tensor_of, "workers": workers, "world_size": world_size}
        ranks = range(world_size)
        found = [block for rank in ranks for block in eval_blocks(far, rank=rank, block=16, **how)]
        asked = list(server.asked)
    found.sort(key=lambda block: block.numbers)
    assert [number for block in found for number in block.numbers] == list(range(sum(SIZES)))
    labels = torch.cat([block.labels[: block.valid] for block in found])
    assert labels.tolist() == [raw.label for raw in alone]
    images = torch.cat([block.images[: block.valid] for block in found])
    assert images[:, 0, 0, 0].tolist() == list(range(sum(SIZES)))
    assert len(asked) == len(set(asked)) == 7, "four blocks, cut by three ends of shards"
