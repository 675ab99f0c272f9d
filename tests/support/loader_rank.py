"""A rank that only loads: `python -m tests.support.loader_rank BACKEND SHARDS`.

Rank 0 tells what all ranks got, by rank.
"""

import sys
from collections.abc import Iterable, Iterator

from open_clip import get_tokenizer

from tests.support.jobs import tiny_job
from tests.support.rank import joined, tell
from trainer.config import Data
from trainer.config.batch_plan import BatchPlan
from trainer.data.lanes import Lanes
from trainer.data.loader import Batch, train_batches
from trainer.data.pixels import RandomCrop
from trainer.data.sample import Source
from trainer.data.source import open_source


def load(source: Source, plan: BatchPlan, rank: int, workers: int, epochs: int = 1) -> Iterator[Batch]:
    """The rank's batches of so many epochs."""
    return train_batches(
        source,
        plan=plan,
        rank=rank,
        seed=1,
        order=Lanes(300, 32),
        pixels=RandomCrop((32, 32), scale=(0.5, 1.0)),
        tokenizer=get_tokenizer("ViT-B-32"),
        workers=workers,
        epochs=epochs,
    )


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
        plan = BatchPlan(ranks, 64, 64 // ranks, 64 // ranks, 1)
        batches = load(open_source(Data(train=(shards,))), plan, rank, workers=1)
        found = comm.all_gather_object(samples(batches))
        if rank == 0:
            tell(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
