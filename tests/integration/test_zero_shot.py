"""Zero-shot classification on any number of ranks gives the same counts.

The sets have few images, many images, and fewer images than ranks.
"""

import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.start import start
from tests.support.zero_shot_rank import CLASSES
from trainer.data.shard_files import PackedSample, write_shards

SIZES = (5, 1, 37)


def labelled(count: int) -> Iterator[PackedSample]:
    """Noise, each with a class."""
    noise = np.random.default_rng(count)
    for number in range(count):
        file = io.BytesIO()
        Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "png")
        yield f"{number:03d}", {"png": file.getvalue(), "cls": str(number % len(CLASSES)).encode()}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Shards of at most eight images."""
    folders = [tmp_path_factory.mktemp(f"images-{size}") for size in SIZES]
    for folder, size in zip(folders, SIZES, strict=True):
        write_shards(labelled(size), folder, 8)
    return [str(folder / "*.tar") for folder in folders]


def classify(backend: str, launcher: str, ranks: int, sets: list[str]) -> list[dict[str, Any]]:
    done = start(backend, launcher, ranks, "tests.support.zero_shot_rank", backend, *sets)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("[{"))
    )
    return found


@pytest.fixture(scope="module")
def by_one_process(sets: list[str]) -> list[dict[str, Any]]:
    return classify("torch", "clipship", 1, sets)


def test_one_process_counts_every_image_once(by_one_process: list[dict[str, Any]]) -> None:
    assert [found["zero_shot_samples"] for found in by_one_process] == list(SIZES)
    top1, top5 = (by_one_process[-1][f"zero_shot_{name}"] for name in ("top1", "top5"))
    assert 0 < top1 < top5 < 1, "a set on which counting wrong shows"


@pytest.mark.parametrize(
    ("backend", "launcher", "ranks"),
    [
        pytest.param("torch", "clipship", 2, marks=pytest.mark.full),
        ("torch", "clipship", 3),
        pytest.param("horovod", "mpirun", 2, marks=[pytest.mark.horovod, pytest.mark.mpi, pytest.mark.full]),
        pytest.param("horovod", "mpirun", 3, marks=[pytest.mark.horovod, pytest.mark.mpi, pytest.mark.full]),
    ],
)
def test_several_ranks_count_the_same(
    sets: list[str], by_one_process: list[dict[str, Any]], backend: str, launcher: str, ranks: int
) -> None:
    assert classify(backend, launcher, ranks, sets) == by_one_process
