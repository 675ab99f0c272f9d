"""A rank that only loads: `python -m tests.support.loader_rank BACKEND SHARDS`.

Rank 0 tells what all ranks got, by rank.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from open_clip import get_tokenizer

from tests.support.jobs import tiny_job
from tests.support.loading import rank_batches
from tests.support.rank import joined, tell
from trainer.config import Data
from trainer.data.loader import Batch
from trainer.data.pixels import RandomCrop
from trainer.data.sample import Source
from trainer.data.source import open_source


def load(source: Source, **how: Any) -> Iterator[Batch]:
    """Micro-batches of the first of two ranks, two in each step of 64 samples; `how` says what differs."""
    crop, tokenizer = RandomCrop((32, 32), scale=(0.5, 1.0)), get_tokenizer("ViT-B-32")
    keys: dict[str, Any] = {"ranks": 2, "accumulation": 2, "seed": 1, "epochs": 1, **how}
    return rank_batches(source, (300, 32), 64, pixels=crop, tokenizer=tokenizer, **keys)


def samples(batches: Iterable[Batch]) -> list[tuple[int, str, str, float]]:
    """(position, key, caption, sum of the augmented pixels)."""
    return [
        (position, key, caption, image.double().sum().item())
        for batch in batches
        for position, key, caption, image in zip(
            batch.positions.tolist(), batch.keys, batch.captions, batch.images, strict=True
        )
    ]


def main(backend: str, shards: str) -> None:
    with joined(tiny_job(comm={"backend": backend})) as comm:
        ranks, rank = comm.world.size, comm.world.rank
        source = open_source(Data(train=(shards,)))
        batches = load(source, ranks=ranks, rank=rank, accumulation=1, workers=1)
        found = comm.all_gather_object(samples(batches))
        if rank == 0:
            tell(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
